"""Rows of the table: trace and log settings, over the whole server and for one model, and what no client may set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tritonclient.grpc.service_pb2 as pb

from conformance.table.cases import Case, Refused, each, equal

NOTHING = {"trace_level": None, "trace_rate": None, "trace_count": None, "log_frequency": None}
JSON_ONLY = {"only": "http", "because": "the message of gRPC has a type for it"}


# --- tracing ----------------------------------------------------------------------------------------------------------


def _plain(ask: Any, told: Any) -> dict[str, Any]:
    if ask.door == "http":
        return told
    return {key: list(value.value) if key == "trace_level" else value.value[0] for key, value in told.settings.items()}


def traces(ask: Any, model: str = "") -> dict[str, Any]:
    return _plain(ask, ask.stock(lambda client: client.get_trace_settings(model)))


def trace(settings: Mapping[str, Any], model: str = "") -> Callable[[Any], Any]:
    """Return the sending of an update by the stock client."""
    return lambda ask: _plain(ask, ask.stock(lambda client: client.update_trace_settings(model, dict(settings))))


def wire_trace(settings: Mapping[str, Any], model: str = "") -> Callable[[Any], Any]:
    """Return the sending of an update by hand; over gRPC every value is a list of texts."""

    def over_http(ask: Any) -> Any:
        return ask.post(f"/v2/models/{model}/trace/setting" if model else "/v2/trace/setting", dict(settings))

    def over_grpc(ask: Any) -> Any:
        message = pb.TraceSettingRequest(model_name=model)
        for key, value in settings.items():
            values = [] if value is None else [value] if isinstance(value, str) else value
            message.settings[key].value.extend(values)
        return _plain(ask, ask.wire("TraceSetting", message))

    return each(over_http, over_grpc)


def undone(send: Callable[[Any], Any], model: str = "") -> Callable[[Any], Any]:
    """Return the sending of something after which the settings are again those of the command line."""

    def sent(ask: Any) -> Any:
        try:
            return send(ask)
        finally:
            trace(NOTHING, model)(ask)

    return sent


def _holds(**wanted: Any) -> Callable[[Any], None]:
    def check(told: Any) -> None:
        assert {key: told[key] for key in wanted} == wanted

    return check


def _traces() -> Iterator[Case]:
    keys = {"trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode"}
    yield Case("trace settings", traces, check=lambda told: equal(set(told), keys))
    yield Case("trace settings of a model", lambda ask: traces(ask, "simple"), check=_holds(trace_mode="triton"))
    yield Case("trace settings of an unknown model", lambda ask: traces(ask, "nobody"), "NOT_FOUND", "nobody")
    yield Case(
        "trace settings changed for an unknown model", trace({"trace_rate": "5"}, "nobody"), "NOT_FOUND", "nobody"
    )
    yield Case(
        "trace settings with a version",
        lambda ask: ask.get("/v2/models/simple/versions/1/trace/setting"),
        "NOT_FOUND",
        "path",
        only="http",
        because="gRPC has no version there",
    )
    changes: list[tuple[str, Any]] = [
        *[("trace_rate", value) for value in ("1", "1000", "4294967295")],
        *[("trace_count", value) for value in ("-1", "0", "100")],
        *[("log_frequency", value) for value in ("0", "50", "4294967295")],
        *[("trace_level", value) for value in (["OFF"], ["TIMESTAMPS"], ["TIMESTAMPS", "TENSORS"])],
    ]
    for key, value in changes:
        for model in ("", "simple"):
            yield Case(
                f"{key} {value} of {model or 'all'}",
                undone(trace({key: value}, model), model),
                check=_holds(**{key: value}),
            )
    yield Case(
        "a model's setting goes before the global one",
        undone(
            undone(
                lambda ask: (
                    trace({"trace_rate": "5"})(ask),
                    trace({"trace_rate": "7"}, "simple")(ask),
                    trace({"trace_rate": "6"})(ask),
                    traces(ask, "simple"),
                )[-1],
                "simple",
            )
        ),
        check=_holds(trace_rate="7"),
    )
    yield Case(
        "a model's setting that is cleared is the global one",
        undone(
            undone(
                lambda ask: (
                    trace({"trace_rate": "5"})(ask),
                    trace({"trace_rate": "7"}, "simple")(ask),
                    trace({"trace_rate": None}, "simple")(ask),
                )[-1],
                "simple",
            )
        ),
        check=_holds(trace_rate="5"),
    )
    yield Case(
        "a global setting that is cleared is the command line's",
        lambda ask: (trace({"trace_rate": "5"})(ask), trace({"trace_rate": None})(ask))[-1],
        check=_holds(trace_rate="1000"),
    )
    yield Case("an update of nothing", wire_trace({}), check=_holds(trace_rate="1000"))
    yield Case(
        "an update with an empty body",
        lambda ask: ask.post("/v2/trace/setting"),
        check=_holds(trace_rate="1000"),
        **JSON_ONLY,
    )


def _bad_traces() -> Iterator[Case]:
    bad: list[tuple[str, Any]] = [
        *[
            ("trace_rate", value)
            for value in ("10000000000", "4294967296", "-5", "", "1.5", "x", " 1", "0x10", "1" * 500)
        ],
        *[("trace_count", value) for value in ("-2", "9999999999", "", "x")],
        *[("log_frequency", value) for value in ("-1", "4294967296", "", "x")],
        *[("trace_level", value) for value in (["NOPE"], ["OFF", "TIMESTAMPS"], ["timestamps"], [""])],
    ]
    for key, value in bad:
        for model in ("", "simple"):
            yield Case(
                f"{key} {str(value)[:20]!r} of {model or 'all'}", wire_trace({key: value}, model), "INVALID_ARG", key
            )
    yield Case("two values of trace_rate", wire_trace({"trace_rate": ["1", "2"]}), "INVALID_ARG", "trace_rate")
    yield Case("an unknown trace setting", wire_trace({"nope": "1"}), "INVALID_ARG", "nope")
    yield Case(
        "trace_rate 0 while a level is set",
        undone(lambda ask: (trace({"trace_level": ["TIMESTAMPS"]})(ask), trace({"trace_rate": "0"})(ask))),
        "INVALID_ARG",
        "trace_rate",
    )
    for value in ("/etc/x", "/tmp/y", ""):
        yield Case(f"trace_file {value!r}", wire_trace({"trace_file": value}), "UNSUPPORTED", "trace_file")
    yield Case("trace_mode", wire_trace({"trace_mode": "opentelemetry"}), "UNSUPPORTED", "trace_mode")
    for value in (5, True, 1.5, {}, [1], [None], [["1"]]):
        yield Case(
            f"trace_rate {value!r} in JSON", wire_trace({"trace_rate": value}), "INVALID_ARG", "trace_rate", **JSON_ONLY
        )
    for value in (5, {}, [5]):
        yield Case(
            f"trace_level {value!r} in JSON",
            wire_trace({"trace_level": value}),
            "INVALID_ARG",
            "trace_level",
            **JSON_ONLY,
        )
    for body in (b"x", [], b"null", b"[" * 100_000):
        yield Case(
            f"trace settings with the body {body[:9]!r}",
            lambda ask, body=body: ask.post("/v2/trace/setting", body),
            "INVALID_ARG",
            **JSON_ONLY,
        )
    yield Case(
        "nothing changes where one setting is bad",
        lambda ask: _unchanged(ask, traces, wire_trace({"trace_rate": "5", "trace_count": "x"})),
    )


def _unchanged(ask: Any, read: Callable[[Any], Any], send: Callable[[Any], Any]) -> None:
    before = read(ask)
    try:
        send(ask)
    except Refused:
        assert read(ask) == before
        return
    raise AssertionError("it was taken")


# --- logging ----------------------------------------------------------------------------------------------------------


def _log_plain(ask: Any, told: Any) -> dict[str, Any]:
    if ask.door == "http":
        return told
    return {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in told.settings.items()}


def logs(ask: Any) -> dict[str, Any]:
    return _log_plain(ask, ask.stock(lambda client: client.get_log_settings()))


def log(settings: Mapping[str, Any]) -> Callable[[Any], Any]:
    return lambda ask: _log_plain(ask, ask.stock(lambda client: client.update_log_settings(dict(settings))))


def wire_log(settings: Mapping[str, Any]) -> Callable[[Any], Any]:
    def over_grpc(ask: Any) -> Any:
        message = pb.LogSettingsRequest()
        for key, value in settings.items():
            kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
            setattr(message.settings[key], kinds[type(value)], value)
        return _log_plain(ask, ask.wire("LogSettings", message))

    return each(lambda ask: ask.post("/v2/logging", dict(settings)), over_grpc)


DEFAULTS = {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0, "log_format": "default"}


def restored(send: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the sending of something after which what is logged is again what was."""

    def sent(ask: Any) -> Any:
        try:
            return send(ask)
        finally:
            log(DEFAULTS)(ask)

    return sent


def _logs() -> Iterator[Case]:
    yield Case("log settings", logs, check=lambda told: equal(told, {"log_file": "", **DEFAULTS}))
    changes: list[tuple[str, Any]] = [
        *[(key, value) for key in ("log_info", "log_warning", "log_error") for value in (True, False)],
        *[("log_verbose_level", value) for value in (0, 1, 2)],
        *[("log_format", value) for value in ("default", "ISO8601")],
    ]
    for key, value in changes:
        yield Case(f"{key} {value}", restored(log({key: value})), check=_holds(**{key: value}))
    yield Case("an update of no log setting", wire_log({}), check=_holds(**DEFAULTS))
    bad: list[tuple[str, Any]] = [
        *[(key, value) for key in ("log_info", "log_warning", "log_error") for value in (1, "true")],
        *[("log_verbose_level", value) for value in (True, "1", 2**32 - 1)],
        *[("log_format", value) for value in (1, True, "", "xml", "iso8601", "%s" * 50)],
        *[("nope", value) for value in (1, True, "x")],
    ]
    for key, value in bad:
        yield Case(
            f"{key} {str(value)[:20]!r} of {type(value).__name__}", restored(wire_log({key: value})), "INVALID_ARG", key
        )
    for value in ("/etc/x", "/tmp/x.sh", "", "../x"):
        yield Case(f"log_file {value!r}", wire_log({"log_file": value}), "UNSUPPORTED", "log_file")
    only_json: list[tuple[str, Any]] = [("log_verbose_level", value) for value in (-1, 2**64, 1.5, [], {})]
    only_json += [("log_info", []), ("log_format", {})]
    for key, value in only_json:
        yield Case(
            f"{key} {value!r} in JSON",
            wire_log({key: value}),
            "INVALID_ARG",
            key,
            **JSON_ONLY,
        )
    for body in (b"x", [], b"null", b"[" * 100_000):
        yield Case(
            f"log settings with the body {body[:9]!r}",
            lambda ask, body=body: ask.post("/v2/logging", body),
            "INVALID_ARG",
            **JSON_ONLY,
        )
    yield Case(
        "null leaves a log setting",
        lambda ask: ask.post("/v2/logging", {"log_info": None}),
        check=_holds(log_info=True),
        **JSON_ONLY,
    )
    yield Case(
        "nothing changes where one log setting is bad",
        lambda ask: _unchanged(ask, logs, wire_log({"log_info": False, "log_verbose_level": "x"})),
    )


CASES = [*_traces(), *_bad_traces(), *_logs()]
CLOSED_CASES = [
    Case(
        "a level where there is no file for traces",
        trace({"trace_level": ["TIMESTAMPS"]}),
        "INVALID_ARG",
        "trace_level file",
    ),
    Case("a rate where there is no file for traces", undone(trace({"trace_rate": "5"})), check=_holds(trace_rate="5")),
]
"""For a server with nothing but the defaults."""
