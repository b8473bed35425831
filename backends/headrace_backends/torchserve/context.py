"""What a handler is told by its `context`: the archive, the process, the requests of a batch; and what it answers by it.

Names and meanings are TorchServe's, so that handlers run as they are. Knows nothing of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headrace_backends.python.logger import Logger
from headrace_backends.python.metrics import Metric, MetricFamily

_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_]")
_OK: Final = 200
_MAX_METRICS: Final = 128


class Context:
    """One for a model; `begin` is called before each batch."""

    def __init__(
        self,
        name: str,
        directory: Path,
        manifest: Mapping[str, Any],
        settings: Mapping[str, Any],
        gpu: int | None,
    ) -> None:
        self.model_name: Final = name
        self.manifest: Final = manifest
        self.model_yaml_config: Final = settings
        self.system_properties: Final[dict[str, Any]] = {
            "model_dir": str(directory),
            "gpu_id": gpu,
            "batch_size": int(settings.get("batchSize", 1)),
            "server_name": "headrace",
            "server_version": "",
            "limit_max_image_pixels": True,
        }
        self.metrics: Final = Metrics(name)
        self.explain = False
        self.cache: Final[dict[str, Any]] = {}
        """What a handler keeps between batches."""
        self.request_ids: dict[int, str] = {}
        self.request_processor: list[_Request] = []

    def begin(self, requests: Sequence[tuple[str, Mapping[str, str]]]) -> None:
        """Note id and headers of the entries of the next batch; forget what was said of the last."""
        self.request_ids = {index: name for index, (name, _) in enumerate(requests)}
        self.request_processor = [_Request(headers) for _, headers in requests]

    def get_request_id(self, idx: int = 0) -> str:
        """Return the client's name for a request."""
        return self.request_ids.get(idx, "")

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        """Return the parameters of a request, as text."""
        return dict(self.request_processor[idx].headers)

    def get_request_header(self, idx: int, key: str) -> str | None:
        """Return a parameter of a request, as text; None where it has none of this name, in any case of letters."""
        headers = self.request_processor[idx].headers
        return next((value for name, value in headers.items() if name.lower() == key.lower()), None)

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Have the answer to a request say what it holds, by its parameter `content_type`."""
        self.request_processor[idx].said["content_type"] = value

    def get_response_content_type(self, idx: int) -> str | None:
        """Return what was said of the answer."""
        return self.request_processor[idx].said.get("content_type")

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Give the answer to a request a parameter."""
        self.request_processor[idx].said[key] = str(value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """Return the parameters that the answer has so far."""
        return dict(self.request_processor[idx].said)

    def set_response_status(self, code: int = _OK, phrase: str = "", idx: int = 0) -> None:
        """Say how a request ended; from 400 on it gets `phrase` as an error."""
        self.request_processor[idx].status = (int(code), str(phrase))

    def set_all_response_status(self, code: int = _OK, phrase: str = "") -> None:
        """Say the same of every request of the batch."""
        for index in range(len(self.request_processor)):
            self.set_response_status(code, phrase, index)


class _Request:
    """What is known of one entry of a batch."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers: Final = headers
        self.said: dict[str, str] = {}
        """Parameters of the answer."""
        self.status = (_OK, "")

    def get_request_property(self, key: str) -> str | None:
        """Return a parameter of the request."""
        return self.headers.get(key)

    def get_request_properties(self) -> dict[str, str]:
        """Return the parameters of the request."""
        return dict(self.headers)

    def add_response_property(self, key: str, value: str) -> None:
        """Give the answer a parameter."""
        self.said[key] = str(value)

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Say how the request ended."""
        self.status = (int(code), reason_phrase or "")


class Metrics:
    """What handlers count: counters are added up, everything else is a gauge with its last value.

    They are among the server's metrics, under `torchserve_` and their name, with the label `model`; dimensions are not
    told apart.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._metrics: dict[str, Metric | None] = {}

    def add_counter(self, name: str, value: float, idx: object = None, dimensions: object = None) -> None:
        """Add `value` to a counter."""
        del idx, dimensions
        metric = self._metric(name, MetricFamily.COUNTER)
        if metric is not None:
            metric.increment(value)

    def add_time(
        self, name: str, value: float, idx: object = None, unit: str = "ms", dimensions: object = None
    ) -> None:
        """Note how long something took."""
        del idx, unit, dimensions
        self._set(name, value)

    def add_size(
        self, name: str, value: float, idx: object = None, unit: str = "MB", dimensions: object = None
    ) -> None:
        """Note how large something is."""
        del idx, unit, dimensions
        self._set(name, value)

    def add_percent(self, name: str, value: float, idx: object = None, dimensions: object = None) -> None:
        """Note a share."""
        del idx, dimensions
        self._set(name, value)

    def add_metric(self, name: str, value: float, *more: object, **named: object) -> None:
        """Note a value."""
        del more, named
        self._set(name, value)

    def add_error(self, name: str, value: object, dimensions: object = None) -> None:
        """Write an error into the log."""
        del dimensions
        Logger.log_warn(f"handler: {name}: {value}")

    def _set(self, name: str, value: float) -> None:
        metric = self._metric(name, MetricFamily.GAUGE)
        if metric is not None:
            metric.set(float(value))

    def _metric(self, name: str, kind: Any) -> Metric | None:
        if name not in self._metrics:
            if len(self._metrics) >= _MAX_METRICS:
                return None
            try:
                family = MetricFamily("torchserve_" + _NOT_IN_NAMES.sub("_", name), f"{name} of a handler", kind)
                self._metrics[name] = family.Metric({"model": self._model})
            except Exception as error:
                Logger.log_warn(f"handler: there will be no metric {name!r}: {error}")
                self._metrics[name] = None
        return self._metrics[name]
