"""OpenAI's Responses API, over the chats of language models: without a memory, each request brings all that was said."""
