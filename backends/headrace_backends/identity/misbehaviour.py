"""What the identity backend can do wrong, by the name of the parameter that asks for it.

For one request alone: `fail` (its value is the error's text), `wrong_dtype`, `wrong_shape`, `missing_output`,
`extra_output`. For the whole batch: `fail_all` (raises), `hang` ("forever", or else until cancelled). For the process:
`crash` (exits), `signal` (a number or a name like SIGSEGV, sent to itself), `nonsense_frame` (garbage on the channel).
The values "false" and False switch a misbehaviour off.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from headrace_backends.identity.parameters import asked
from headrace_protocol.datatype import Array
from headrace_protocol.errors import internal
from headrace_protocol.messages import Parameter

CRASH_STATUS: Final = 42


def misbehave(parameters: Mapping[str, Parameter]) -> None:
    """Do what harms the whole batch or process, if asked to. May not return."""
    if asked(parameters, "fail_all"):
        raise RuntimeError(str(parameters["fail_all"]))
    if asked(parameters, "crash"):
        os._exit(CRASH_STATUS)
    if asked(parameters, "signal"):
        name = str(parameters["signal"])
        signal.raise_signal(
            int(name) if name.isdecimal() else signal.Signals[name]
        )  # to this thread: it does not go on
    if asked(parameters, "nonsense_frame"):
        write_garbage()
    if parameters.get("hang") == "forever":
        threading.Event().wait()


def fail(parameters: Mapping[str, Parameter]) -> None:
    """Raise the error that one request asked for."""
    if asked(parameters, "fail"):
        raise internal(str(parameters["fail"]))


def alter(outputs: dict[str, Array], parameters: Mapping[str, Parameter]) -> dict[str, Array]:
    """Return the outputs of one request, spoilt as asked."""
    if asked(parameters, "wrong_dtype"):
        return {name: _other_type(array) for name, array in outputs.items()}
    if asked(parameters, "wrong_shape"):
        return {name: array[None] for name, array in outputs.items()}
    if asked(parameters, "missing_output"):
        return dict(list(outputs.items())[1:])
    if asked(parameters, "extra_output"):
        return outputs | {"UNDECLARED": np.zeros(1, np.float32)}
    return outputs


def write_garbage() -> None:
    """Write bytes that are no frame to every socket of the process that keeps datagrams apart: the channel."""
    for entry in Path("/proc/self/fd").iterdir():
        if not str(entry.readlink() if entry.is_symlink() else "").startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as found:
            if found.type == socket.SOCK_SEQPACKET:
                found.send(b"\x00\xc1 this is no frame")


def _other_type(array: Array) -> Array:
    return np.zeros(array.shape, np.int8 if array.dtype != np.int8 else np.float32)
