"""check_backend: what headrace expects of every backend, in executable form, without a server or a process.

The author of a backend calls it from a test with a model and example inputs. Each check is also a function of its own,
so that a failing one is named by the traceback; failures are AssertionErrors that say what was expected.
"""

from __future__ import annotations

from headrace_backends.api import Backend
from headrace_backends.conformance.checks import CHECKS
from headrace_backends.conformance.model import Answer, Case, Inputs, LoadedModel, loaded
from headrace_backends.conformance.streams import STREAM_CHECKS

__all__ = ["CHECKS", "STREAM_CHECKS", "Answer", "Case", "Inputs", "LoadedModel", "check_backend", "loaded"]


def check_backend(make_backend: type[Backend], case: Case) -> None:
    """Run every check that applies to the case. Raises AssertionError, or InferError where the model does not load."""
    for check in STREAM_CHECKS if case.decoupled else CHECKS:
        with loaded(make_backend, case) as model:
            check(model)
