"""What crosses the process boundary between the headrace server and its backends, and nothing else.

A leaf: it imports neither side. It holds the wire-compatible KServe v2 / ModelConfig schema, datatypes, tensors,
the shared-memory arena, the closed set of messages, their framing, and the one error class.
"""
