"""Which language models there are, by every name that clients have for them: their own, aliases, and adapters'."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from headrace import __version__
from headrace.gateway.http.openai.errors import missing, no_such_model, refusal
from headrace.gateway.version import parse_version
from headrace.planes import DataPlane
from headrace.types import LATEST
from headrace_protocol.errors import ErrorCode, InferError, internal
from headrace_protocol.generation import CARD_DECODER, CARD_PARAMETER, ModelCard, Task

_OF_A_VERSION: Final = "/versions/"
_REMEMBERED: Final = 1024


class _Told(NamedTuple):
    """What a model says of itself."""

    card: ModelCard
    fingerprint: str


class LanguageModel(NamedTuple):
    """A model as a client asked for it."""

    id: str
    """As the client named it, and as answers name it."""
    name: str
    version: int
    card: ModelCard
    fingerprint: str
    """Changes with the model's version, its card and the server's version."""
    adapter: str | None = None

    def check_task(self, task: Task, what: str) -> None:
        """Raise HttpError 400 where the model does not do this; `what` is the endpoint in words."""
        if task not in self.card.tasks:
            able = ", ".join(self.card.tasks)
            raise refusal(f"the model {self.id!r} gives no {what}; it can {able}", "model", "unsupported_model")


class ModelDirectory:
    """The language models of one data plane. Looks anew for each request: models come and go."""

    def __init__(self, data: DataPlane) -> None:
        self._data = data
        self._elsewhere: dict[str, str] = {}
        """The model in which a name that is not a model's was last found."""

    def find(self, asked: str | None, task: Task = "generate") -> LanguageModel:
        """Return the model of this name; without a name the only one there is that does the task.

        Raises HttpError 404 for an unknown one and 400 where a name is needed, InferError UNAVAILABLE for one that is
        known and does not serve now.
        """
        if asked is None:
            return self._only(task)
        name, found, version = asked.partition(_OF_A_VERSION)
        number = parse_version(version) if found else LATEST
        try:
            card = self._card(name, number)
        except InferError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
        else:
            if card is None:
                raise refusal(
                    f"the model {asked[:200]!r} is not a language model; /v2 serves it",
                    "model",
                    "model_not_found",
                    status=404,
                )
            return LanguageModel(asked, name, number, *card)
        return self._of_other_name(asked)

    def all(self) -> list[LanguageModel]:
        """Return every language model under each of its names, adapters' among them."""
        found: dict[str, LanguageModel] = {}
        for name, card in self._cards():
            found[name] = LanguageModel(name, name, LATEST, *card)
        for model in list(found.values()):
            for alias in model.card.aliases:
                found.setdefault(alias, model._replace(id=alias))
            for adapter in model.card.adapters:
                found.setdefault(adapter.name, model._replace(id=adapter.name, adapter=adapter.name))
        return list(found.values())

    def _only(self, task: Task) -> LanguageModel:
        able = [LanguageModel(name, name, LATEST, *card) for name, card in self._cards()]
        able = [model for model in able if task in model.card.tasks]
        if len(able) == 1:
            return able[0]
        if not able:
            raise missing("model")
        names = ", ".join(model.id for model in able[:20])
        raise refusal(f"'model' is missing; it is one of {names}", "model", "missing_required_parameter")

    def _of_other_name(self, asked: str) -> LanguageModel:
        known = self._elsewhere.get(asked)
        if known is not None:
            try:
                card = self._card(known, LATEST)
            except InferError as error:
                if error.code is ErrorCode.UNAVAILABLE:
                    raise
                card = None
            if card is not None and (model := _named(asked, known, card)) is not None:
                return model
            del self._elsewhere[asked]
        for name, card in self._cards():
            if (model := _named(asked, name, card)) is not None:
                if len(self._elsewhere) >= _REMEMBERED:
                    self._elsewhere.clear()
                self._elsewhere[asked] = name
                return model
        raise no_such_model(asked)

    def _cards(self) -> list[tuple[str, _Told]]:
        names = dict.fromkeys(name for name, _ in self._data.models())
        return [(name, card) for name in names if (card := self._card(name, LATEST)) is not None]

    def _card(self, name: str, version: int) -> _Told | None:
        parameters = self._data.model_config(name, version).parameters
        return _decoded(parameters[CARD_PARAMETER].string_value) if CARD_PARAMETER in parameters else None


def _named(asked: str, name: str, told: _Told) -> LanguageModel | None:
    if asked in told.card.aliases:
        return LanguageModel(asked, name, LATEST, *told)
    if any(adapter.name == asked for adapter in told.card.adapters):
        return LanguageModel(asked, name, LATEST, *told, asked)
    return None


@lru_cache(maxsize=256)
def _decoded(text: str) -> _Told:
    try:
        card = CARD_DECODER.decode(text)
    except msgspec.MsgspecError as error:
        raise internal(f"the backend told of its language model what cannot be read: {error}") from None
    digest = hashlib.blake2s(f"{__version__}\0{text}".encode(), digest_size=5)
    return _Told(card, f"fp_{digest.hexdigest()}")
