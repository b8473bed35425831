"""The LLM backend: continuous batching over a paged KV cache. See docs/llm.md."""
