"""What the registry needs from others, as protocols, and what it gives them: where a model's content lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from headrace.repository.config_text import ParsedConfig
from headrace.repository.model_config import ModelConfig


class TemporaryFiles(Protocol):
    """Files that came with a load call and lie outside the repositories."""

    def remove(self) -> None:
        """Remove them. Blocking, idempotent."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ModelSource:
    """Content that a model's versions are loaded from, as the registry found it.

    `directory` and `versions` are where the files lie, be it in a repository or uploaded; the loader reads them later,
    so it must cope with files that are gone by then.
    """

    name: str
    directory: Path
    versions: Mapping[int, Path] = field(default_factory=dict)
    config: ParsedConfig = field(default_factory=ParsedConfig)
    """What the author wrote in config.pbtxt, or the load call instead; not completed, not validated."""
    temporary: TemporaryFiles | None = None
    """What holds `directory` if its files were uploaded. The registry removes it after the last use."""
    members: frozenset[str] = frozenset()
    """Models that this one, an ensemble, is made of; they serve by the time it is loaded."""


@dataclass(frozen=True, slots=True)
class LoadOverride:
    """What a load call brings instead of the repository's content. Owned by the registry once given to `load`."""

    config: ParsedConfig
    directory: Path | None = None
    """The uploaded model folder, to be used instead of the one in the repository."""
    temporary: TemporaryFiles | None = None
    """What to remove when nothing uses `directory` any more."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Which of a model's versions serves a request that names none: the default, else the highest, else one of the `last`."""

    default: int | None = None
    last: frozenset[int] = frozenset()
    """Those on trial."""

    def rank(self, version: int) -> int:
        """Return which goes first, the lower."""
        if version == self.default:
            return 0
        return 2 if version in self.last else 1


class TrafficBook(Protocol):
    """Who keeps what models' configurations say about the traffic of their versions."""

    def adopt(self, name: str, text: str | None) -> None:
        """Take over what the configuration that is about to be loaded says; None = nothing. Raises ConfigError."""
        ...


class ServedModel(Protocol):
    """A loaded version. The loader makes and owns it; the registry says when it serves and when it ends."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def accepting(self) -> bool:
        """Whether a request may be given to it, if only to wait while a backend starts again.

        Read for every request, so it must be cheap. Once False it stays so: a load then replaces the model.
        """
        ...

    @property
    def ready(self) -> bool:
        """Whether a request would be served now: the backend lives. What health and the index tell."""
        ...

    @property
    def not_ready_reason(self) -> str:
        """Why not, if not."""
        ...

    def abort(self) -> None:
        """Fail the requests in it at once: the server stops and will wait no longer. The unload follows."""
        ...


M = TypeVar("M", bound=ServedModel)


class ModelLoader(Protocol[M]):
    """Makes served models out of sources."""

    async def load(self, source: ModelSource, version: int) -> M:
        """Load a version and return it once it can serve.

        Raises InferError or ConfigError with a sentence that says why not. Cancelled, it cleans up what it began.
        """
        ...

    async def unload(self, model: M) -> None:
        """Take a version down; nobody uses it any more."""
        ...

    async def resize(self, model: M, source: ModelSource) -> bool:
        """Give a version that serves the instances that `source` asks for, which differs in nothing else.

        False where it can only be loaded anew. Raises as `load` does; the version is as it was then.
        """
        ...
