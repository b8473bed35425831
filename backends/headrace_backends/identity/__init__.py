"""The identity backend."""
