"""The rpcs that read and change trace and log settings, as functions from bytes to bytes.

Here it is checked in which field a value travels; what it may be is decided behind `ControlPlane.trace` and `.log`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.gateway.grpc.request_parsing import parse
from headrace.planes import ControlPlane, LogValue
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import invalid

_MANY: Final = "trace_level"
"""The one trace setting that takes several values."""
_LOG_FIELD: Final = {
    "log_file": "string_param",
    "log_info": "bool_param",
    "log_warning": "bool_param",
    "log_error": "bool_param",
    "log_verbose_level": "uint32_param",
    "log_format": "string_param",
}


class SettingsService:
    """The handlers, by rpc."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self.handlers: Final[dict[str, Callable[[bytes], bytes]]] = {
            "TraceSetting": self.trace_setting,
            "LogSettings": self.log_settings,
        }

    def trace_setting(self, data: bytes) -> bytes:
        """Change the settings that the request holds, none where it holds none; answer with those in force."""
        request = parse(pb.TraceSettingRequest, data)
        changes: dict[str, list[str] | None] = {}
        for key, setting in request.settings.items():
            if len(setting.value) > 1 and key != _MANY:
                raise invalid(f"trace setting '{key}' takes one value, got {len(setting.value)}")
            changes[key] = list(setting.value) or None
        trace = self._control.trace
        settings = trace.update(request.model_name, changes) if changes else trace.get(request.model_name)
        response = pb.TraceSettingResponse()
        for key, value in settings.items():
            response.settings[key].value.extend([value] if isinstance(value, str) else value)
        return response.SerializeToString()

    def log_settings(self, data: bytes) -> bytes:
        """Change the settings that the request holds, none where it holds none; answer with all."""
        request = parse(pb.LogSettingsRequest, data)
        changes = {key: _log_value(key, setting) for key, setting in request.settings.items()}
        log = self._control.log
        response = pb.LogSettingsResponse()
        for key, value in (log.update(changes) if changes else log.get()).items():
            told = response.settings[key]
            if isinstance(value, bool):
                told.bool_param = value
            elif isinstance(value, int):
                told.uint32_param = value
            else:
                told.string_param = value
        return response.SerializeToString()


def _log_value(key: str, setting: pb.LogSettingsRequest.SettingValue) -> LogValue:
    field = setting.WhichOneof("parameter_choice")
    wanted = _LOG_FIELD.get(key)
    if wanted is None:
        raise invalid(f"unknown log setting '{key}', expected one of {', '.join(_LOG_FIELD)}")
    if field != wanted:
        raise invalid(f"log setting '{key}' takes a {wanted}, got {f'a {field}' if field else 'no value'}")
    value: LogValue = getattr(setting, wanted)
    return value
