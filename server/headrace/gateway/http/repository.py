"""The bodies of the repository API: index, load, unload. Pure: bytes to arguments of the control plane."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headrace.gateway.http.bodies import decode_body, from_base64
from headrace.gateway.http.json_text import describe
from headrace.gateway.http.request import Body
from headrace.gateway.version import named_version
from headrace.planes import LoadParameters
from headrace_protocol.errors import invalid, unsupported

_FILE: Final = "file:"
_VERSION: Final = "version"


class _Index(msgspec.Struct):
    ready: bool = False


class _Control(msgspec.Struct):
    parameters: dict[str, Any] | None = None


_index_decoder: Final = msgspec.json.Decoder(_Index)
_control_decoder: Final = msgspec.json.Decoder(_Control)
_traffic_decoder: Final = msgspec.json.Decoder(dict[str, Any])


def decode_index(body: Body) -> bool:
    """Return `ready` of an index request: whether only ready models are asked for. An empty body asks for all."""
    return decode_body(_index_decoder, body, "the index request").ready if body else False


def decode_load(body: Body) -> LoadParameters:
    """Return the parameters of a load request: "config" as text, each "file:<path>" as the bytes it stands for."""
    parameters: LoadParameters = {}
    for key, value in _parameters(body, "the load request").items():
        if key == "config":
            if not isinstance(value, str):
                raise invalid(f"load parameter 'config': expected JSON text in a string, got {describe(value)}")
            parameters[key] = value
        elif key.startswith(_FILE):
            parameters[key] = _file_content(key, value)
        elif key == _VERSION:
            parameters[key] = _version("load", value)
        else:
            raise invalid(f"unknown load parameter '{key}'; known are 'config', 'version' and 'file:<path>'")
    return parameters


def decode_unload(body: Body) -> tuple[bool, int | None]:
    """Return `unload_dependents` and `version` (None = all of them) of an unload request."""
    dependents, version = False, None
    for key, value in _parameters(body, "the unload request").items():
        if key == _VERSION:
            version = _version("unload", value)
            continue
        if key != "unload_dependents":
            raise invalid(f"unknown unload parameter '{key}'; known are 'unload_dependents' and 'version'")
        if not isinstance(value, bool):
            raise invalid(f"unload parameter '{key}': expected true or false, got {describe(value)}")
        dependents = value
    return dependents, version


def decode_traffic(body: Body) -> dict[str, Any]:
    """Return the changes of a traffic policy; what they may be is the control plane's to say."""
    return decode_body(_traffic_decoder, body, "the traffic policy") if body else {}


def check_target(model: str, repository: str) -> None:
    """Raise where a load or unload names a repository, or something that cannot be a model's directory."""
    if repository:
        raise unsupported(f"repository '{repository}': naming a repository is not supported; leave it out of the path")
    if not model.strip():
        raise invalid("the model name is empty")
    if "/" in model or "\\" in model or "\0" in model or model in (".", ".."):
        raise invalid(f"model name {model[:80]!r} holds a path, it has to be a plain name")


def _file_content(key: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise invalid(f"load parameter '{key[:80]}': expected base64 in a string, got {describe(value)}")
    try:
        return from_base64(value)
    except ValueError:
        raise invalid(f"load parameter '{key[:80]}': its value is not base64") from None


def _version(verb: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise invalid(f"{verb} parameter 'version': expected a number above 0, got {describe(value)}")
    return named_version(str(value))


def _parameters(body: Body, what: str) -> dict[str, Any]:
    return (decode_body(_control_decoder, body, what).parameters or {}) if body else {}
