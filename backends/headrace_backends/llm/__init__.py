"""The LLM backend: continuous batching over a paged KV cache. See docs/llm.md."""

import os

# Read when torch's libraries are loaded. Threads that spin while they wait for the next operator take cores from the other
# models, and from the server.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# But a few microseconds: between two products of a step that is what the next one takes to come.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("TQDM_DISABLE", "1")  # transformers draws a bar into the log while it unpacks GGUF files
