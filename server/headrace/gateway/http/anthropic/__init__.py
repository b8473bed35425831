"""The door that Anthropic's clients know, over the chats of language models."""
