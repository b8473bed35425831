"""The Python backend: runs `model.py` files written for Triton's, which see the module triton_python_backend_utils."""
