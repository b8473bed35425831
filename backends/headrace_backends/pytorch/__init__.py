"""The PyTorch backend."""

import os

# Read when the framework's libraries are loaded. A compiled package does not look at the shapes of what it is given
# unless asked to, and reads beyond the end of a smaller tensor.
os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
# Threads that spin while they wait for the next operator take cores from the other models, and from the server.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
