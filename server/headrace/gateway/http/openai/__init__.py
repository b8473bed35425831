"""The doors that OpenAI's clients know, over language models."""
