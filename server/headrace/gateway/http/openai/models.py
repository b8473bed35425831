"""GET /v1/models and /v1/models/{id}: the language models, under each of their names, and what else these doors serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.clock import Clock
from headrace.gateway.http.answer import Answer, json_answer
from headrace.gateway.http.openai.declared import declared_names
from headrace.gateway.http.openai.directory import LanguageModel, ModelDirectory
from headrace.gateway.http.request import Handler, HttpRequest
from headrace.gateway.http.routes import Endpoint, Route
from headrace.planes import DataPlane


class Models:
    """The two endpoints over a data plane."""

    def __init__(self, data: DataPlane, clock: Clock) -> None:
        self._data = data
        self._directory = ModelDirectory(data)
        self._created = clock.wall_ns() // 1_000_000_000
        self.handlers: Final[Mapping[Endpoint, Handler]] = {
            Endpoint.OPENAI_MODELS: Handler(reply=self._list),
            Endpoint.OPENAI_MODEL: Handler(reply=self._one),
        }

    def _list(self, http: HttpRequest, _route: Route) -> Answer:
        caller = http.caller
        shown = [model for model in self._directory.all() if caller is None or caller.may_ask(model.name)]
        told = [self._told(model) for model in shown]
        told += [self._told_declared(name) for name in self._declared() if caller is None or caller.may_ask(name)]
        return json_answer({"object": "list", "data": told})

    def _one(self, _http: HttpRequest, route: Route) -> Answer:
        if route.model in self._declared():
            return json_answer(self._told_declared(route.model))
        return json_answer(self._told(self._directory.find(route.model)))

    def _declared(self) -> list[str]:
        """Return the models that say they make vectors or scores of texts."""
        return [*declared_names(self._data, "embedding"), *declared_names(self._data, "rerank")]

    def _told_declared(self, name: str) -> dict[str, Any]:
        head = {"id": name, "object": "model", "created": self._created, "owned_by": "headrace", "root": name}
        return {**head, "parent": None, "max_model_len": None}

    def _told(self, model: LanguageModel) -> dict[str, Any]:
        return {
            "id": model.id,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "root": model.name,
            "parent": model.name if model.adapter is not None else None,
            "max_model_len": model.card.max_model_len,
        }
