"""What a load call may bring with it: a configuration, and the files of a whole model folder. Pure.

Everything is checked here, before the first byte is written (uploads.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from headrace.planes import LoadParameters
from headrace.repository.config_text import MODEL_DIRECTORY, ParsedConfig, parse_json
from headrace.repository.layout import MAX_VERSION
from headrace.repository.model_config import ConfigError
from headrace.repository.outside import ENVIRONMENT
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.errors import invalid, unsupported

FILE_PREFIX: Final = "file:"
MAX_FILES: Final = 1000
MAX_PATH_BYTES: Final = 1024
MAX_PATH_PARTS: Final = 16
MAX_NAME_BYTES: Final = 255

_VERSION: Final = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class OverrideRequest:
    """The parameters of a load call, checked. `files` are paths below the model's folder, `<version>/<relative>`."""

    config: ParsedConfig
    files: Mapping[str, bytes] = field(default_factory=dict)


def parse_override(parameters: LoadParameters, *, allow_files: bool) -> OverrideRequest | None:
    """Check the parameters of a load call; None if it brings nothing. Raises INVALID_ARG or UNSUPPORTED."""
    config_text: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            if not isinstance(value, str):
                raise invalid(f"load parameter 'config': expected JSON text, got {_kind(value)}")
            config_text = value
        elif key.startswith(FILE_PREFIX):
            if not allow_files:
                raise unsupported(
                    f"load parameter {_shown(key)}: this server takes no uploaded model files; --allow-model-upload "
                    "allows them"
                )
            if not isinstance(value, bytes):
                raise invalid(f"load parameter {_shown(key)}: expected the file's bytes, got {_kind(value)}")
            files[_checked_path(key)] = value
        else:
            raise invalid(f"load parameter {_shown(key)} is unknown; expected 'config' or 'file:<version>/<path>'")
    if len(files) > MAX_FILES:
        raise invalid(f"{len(files)} files are uploaded, at most {MAX_FILES} go")
    _check_no_file_is_a_folder(files)
    if config_text is None:
        if files:
            raise invalid(
                "uploaded files replace the whole model folder, so load parameter 'config' is needed with them"
            )
        return None
    try:
        config = parse_json(config_text, "load parameter 'config'")
    except ConfigError as error:
        raise invalid(f"load parameter 'config': {error}") from None
    _check_paths_named(config.proto)
    return OverrideRequest(config, files)


def _check_paths_named(proto: pb.ModelConfig) -> None:
    """Refuse paths by which whoever may load a model would have the server open files outside the model's folder.

    A configuration that lies in a repository may name them: who writes there can put a link as well.
    """
    named = [("default_model_filename", proto.default_model_filename)]
    named += [("model_operations.op_library_filename", path) for path in proto.model_operations.op_library_filename]
    named += [(f"cc_model_filenames.{key}", path) for key, path in proto.cc_model_filenames.items()]
    named += [(f"output[{place}].label_filename", output.label_filename) for place, output in enumerate(proto.output)]
    for where, path in named:
        if path.startswith("/") or ".." in path.split("/"):
            raise invalid(f"load parameter 'config': {where}: {_shown(path)} leads out of the model's folder")
    environment = proto.parameters[ENVIRONMENT].string_value if ENVIRONMENT in proto.parameters else ""
    if environment and not _is_below(environment):
        raise invalid(
            f"load parameter 'config': parameters.{ENVIRONMENT}: {_shown(environment)} leads out of the model's folder: "
            f"only a configuration in the repository may name another place than {MODEL_DIRECTORY}/..."
        )


def _is_below(path: str) -> bool:
    head, _, below = path.partition("/")
    return head == MODEL_DIRECTORY and ".." not in below.split("/") and MODEL_DIRECTORY not in below


def _checked_path(key: str) -> str:
    path = key.removeprefix(FILE_PREFIX)
    expected = f"load parameter {_shown(key)}: expected 'file:<version>/<path>'"
    if not path.isprintable() or "\\" in path:
        raise invalid(f"{expected} without control characters or backslashes")
    if len(path.encode()) > MAX_PATH_BYTES:
        raise invalid(f"{expected} of at most {MAX_PATH_BYTES} bytes")
    version, *parts = path.split("/")
    if not parts or not _VERSION.fullmatch(version) or int(version) > MAX_VERSION:
        raise invalid(f"{expected}, where the version is a number without leading zeros")
    if len(parts) > MAX_PATH_PARTS:
        raise invalid(f"{expected} of at most {MAX_PATH_PARTS} path parts")
    for part in parts:
        if part in {"", ".", ".."} or len(part.encode()) > MAX_NAME_BYTES:
            raise invalid(f"{expected} that stays in the model's folder: no empty part, no '.', no '..'")
    return path


def _check_no_file_is_a_folder(files: Mapping[str, bytes]) -> None:
    for path in files:
        parts = path.split("/")
        for length in range(1, len(parts)):
            above = "/".join(parts[:length])
            if above in files:
                raise invalid(f"file {_shown(above)} is uploaded, and as a folder too: {_shown(path)}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "...")


def _kind(value: object) -> str:
    return {str: "text", bytes: "bytes", bool: "a boolean", int: "an integer"}.get(type(value), type(value).__name__)
