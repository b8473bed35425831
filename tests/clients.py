"""Requests to a running server, the same over each door: tritonclient for tensors, plain JSON for the rest."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import np_to_triton_dtype

from harness import RunningServer

DOORS = ("http json", "http binary", "grpc")


def ask(
    server: RunningServer,
    door: str,
    model: str,
    inputs: Mapping[str, np.ndarray],
    shapes: Mapping[str, Sequence[int]] | None = None,
    **classes: int,
) -> dict[str, np.ndarray]:
    """Return the outputs by name. `shapes` are sent instead of the arrays' own, `classes` ask for the top k."""
    grpc, binary = door == "grpc", door != "http json"
    module, address = (grpcclient, server.grpc) if grpc else (httpclient, server.http)
    how = {} if grpc else {"binary_data": binary}
    tensors = []
    for name, array in inputs.items():
        shaped = array.reshape((shapes or {}).get(name, array.shape))
        tensors.append(module.InferInput(name, shaped.shape, np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(shaped, **how)
    wanted = [module.InferRequestedOutput(name, class_count=count, **how) for name, count in classes.items()]
    with module.InferenceServerClient(address) as client:
        if not grpc and not binary:
            wanted = wanted or [
                module.InferRequestedOutput(output["name"], binary_data=False)
                for output in client.get_model_metadata(model)["outputs"]
            ]
        result = client.infer(model, tensors, outputs=wanted or None)
        response = result.get_response(as_json=True) if grpc else result.get_response()
        return {output["name"]: result.as_numpy(output["name"]) for output in response["outputs"]}


def call(server: RunningServer, path: str, body: object = None) -> tuple[int, Any]:
    """GET `path`, or POST `body` as JSON; return the status and the JSON of the answer (None where it has none)."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://{server.http}{path}", data), timeout=60) as answer:
            text, status = answer.read(), answer.status
    except urllib.error.HTTPError as error:
        with error:
            text, status = error.read(), error.code
    return status, json.loads(text) if text else None


def infer(
    server: RunningServer, model: str, *tensors: tuple[str, str, list[int], Any], **fields: Any
) -> tuple[int, Any]:
    """POST a JSON inference request of (name, datatype, shape, data) tensors; return status and answer."""
    inputs = [dict(zip(("name", "datatype", "shape", "data"), tensor, strict=True)) for tensor in tensors]
    return call(server, f"/v2/models/{model}/infer", {"inputs": inputs, **fields})
