"""A registry of versions that answer when the test says so, for what shares, shadows and watches requests."""

from __future__ import annotations

from typing import Any

from configs import model, tensor
from headrace.instances.signature import ModelSignature
from headrace.observability.statistics import ModelStatistics
from headrace.repository.sources import Preference
from headrace.types import LATEST, InferenceRequest, InferenceResponse, InputTensor
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import InferError, not_found, unavailable


class Driver:
    """Holds what is submitted."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.prepared: list[Any] = []
        self.cancelled: list[int] = []
        self.refuses: InferError | None = None

    def submit(self, prepared: Any, done: Any) -> int:
        if self.refuses is not None:
            raise self.refuses
        self.prepared.append(prepared)
        self.done.append(done)
        return len(self.done)

    def cancel(self, pending: int) -> None:
        self.cancelled.append(pending)


class Version:
    """A loaded version."""

    def __init__(self, version: int, *, decoupled: bool = False) -> None:
        self.name, self.version = "m", version
        self.labels: dict[str, Any] = {}
        self.config = model([tensor("A", "FP32", 1)], [tensor("B", "FP32", 1)], 8, decoupled=decoupled)
        self.signature = ModelSignature(self.config, version)
        self.statistics = ModelStatistics()
        self.driver = Driver()
        self.sequences: Any = None
        self.ready = self.accepting = True
        self.restarts = 0
        self.not_ready_reason = "it is not well"


class Registry:
    """Versions of one model, m; the highest is the default unless a preference says otherwise."""

    def __init__(self, *versions: int) -> None:
        self.models = {version: Version(version) for version in versions}
        self.leased: dict[int, int] = dict.fromkeys(versions, 0)
        self.preference: Preference | None = None

    def versions(self, name: str) -> tuple[int, ...]:
        return tuple(sorted(self.models)) if name == "m" else ()

    def get(self, name: str, version: int = LATEST) -> Version:
        if name != "m":
            raise not_found(f"no model {name}")
        if version == LATEST:
            preference = self.preference or Preference()
            able = [number for number, found in self.models.items() if found.accepting]
            if not able:
                raise unavailable("none serves")
            return self.models[min(able, key=lambda number: (preference.rank(number), -number))]
        if version not in self.models:
            raise not_found(f"no version {version}")
        return self.models[version]

    def acquire(self, name: str, version: int) -> Version:
        found = self.get(name, version)
        if not found.accepting:
            raise unavailable("it has died too often")
        self.leased[found.version] += 1
        return found

    def acquire_where(self, name: str, version: int, fits: Any) -> Version | None:
        for found in self.models.values():
            if version in (LATEST, found.version) and fits(found):
                self.leased[found.version] += 1
                return found
        return None

    def release(self, found: Version) -> None:
        self.leased[found.version] -= 1
        assert self.leased[found.version] >= 0

    def leases(self, found: Version) -> int:
        return self.leased[found.version]

    def prefer(self, name: str, preference: Preference | None) -> None:
        assert name == "m"
        self.preference = preference


def a_request(**fields: Any) -> InferenceRequest:
    """Return a request to m that names no version, with other fields as given."""
    made = InferenceRequest("m")
    made.inputs = [InputTensor("A", FP32, (1, 1), bytes(4))]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class Answer(InferenceResponse):
    """A response that notes its release."""

    __slots__ = ("released",)

    def __init__(self, *, final: bool = True) -> None:
        self.released = 0
        super().__init__("m", 1, [], release=self._count)
        self.final = final

    def _count(self) -> None:
        self.released += 1
