"""The ONNX Runtime backend."""

import os

# Read when the framework is imported. Its telemetry writes a database into the home directory, talks to the network
# and starts a thread, which would not survive a fork; whoever wants it sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
