"""Has a running server's model of the backend "asking" do something; see asking_backend.py."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tritonclient.http as httpclient

from harness import RunningServer


def ask(server: RunningServer, of: str = "asker", data: np.ndarray | None = None, **command: Any) -> Any:
    """Have a model ask something; return what it tells of that."""
    given = [httpclient.InferInput("ASK", [1], "BYTES")]
    given[0].set_data_from_numpy(np.array([json.dumps(command).encode()], np.object_))
    if data is not None:
        given.append(httpclient.InferInput("DATA", data.shape, "FP32"))
        given[1].set_data_from_numpy(data)
    with httpclient.InferenceServerClient(server.http, network_timeout=60, connection_timeout=60) as client:
        return json.loads(client.infer(of, given).as_numpy("ANSWER")[0])
