"""Gatekeeper: whether who calls may make this call, the same at every door. Knows keys and roles, no transport."""

from __future__ import annotations

from typing import Final

from headrace.access.caller import Caller, Role, forbidden, names, unauthenticated
from headrace.access.table import AccessTable

Roles = frozenset[Role] | None
"""One of which a call takes; None = it is open to all."""

_ANY: Final = frozenset({Role.INFER, Role.OBSERVE})
_ADMIN: Final = frozenset({Role.ADMIN})
_BY_KIND: Final[dict[str, Roles]] = {
    "health": None,
    "metadata": _ANY,
    "inference": frozenset({Role.INFER}),
    "openai": frozenset({Role.INFER}),
    "model-config": _ANY,
    "statistics": _ANY,
    "model-repository": _ADMIN,
    "shared-memory": _ADMIN,
    "trace": _ADMIN,
    "logging": _ADMIN,
    "rollout": _ADMIN,
}
INDEX: Final[Roles] = frozenset({Role.OBSERVE})
"""Of the repository's index, which changes nothing."""
METRICS: Final[Roles] = frozenset({Role.OBSERVE})
_BEARER: Final = "bearer "


def roles_of(kind: str) -> Roles:
    """Return the roles that calls of a kind take; of a kind that is not known, an admin's."""
    return _BY_KIND.get(kind, _ADMIN)


class Gatekeeper:
    """Looks keys up in a table, which may change at any time."""

    def __init__(self, table: AccessTable) -> None:
        self._table: Final = table

    def caller(self, authorization: str | None, api_key: str | None) -> Caller:
        """Return who calls, by `Authorization: Bearer KEY` or by `X-API-Key: KEY`; without either, anonymous.

        Raises UNAVAILABLE of detail UNAUTHENTICATED for a key that nobody has, and for another way to authorize.
        """
        key = api_key
        if authorization is not None:
            if authorization[: len(_BEARER)].lower() != _BEARER:
                raise unauthenticated("Authorization takes the form: Bearer <key>")
            key = authorization[len(_BEARER) :].strip()
        if key is None:
            return self._table.anonymous
        found = self._table.caller_of(key)
        if found is None:
            raise unauthenticated("the key is not known, or has expired")
        return found

    def check(self, caller: Caller, roles: frozenset[Role], model: str = "") -> None:
        """Raise UNAVAILABLE where the caller has none of the roles, or may not ask the model it names.

        The detail is UNAUTHENTICATED for who has shown no key, FORBIDDEN for who has.
        """
        if not caller.has(roles):
            if caller is self._table.anonymous:
                raise unauthenticated("this takes a key: Authorization: Bearer <key>, or X-API-Key: <key>")
            raise forbidden(f"caller '{caller.name}' lacks the role {names(roles)}")
        if model:
            self.asking(caller, model)

    def asking(self, caller: Caller, model: str) -> Caller:
        """Return the caller, who may ask the model. Raises UNAVAILABLE of detail FORBIDDEN, be the model there or not."""
        if not caller.may_ask(model):
            raise forbidden(f"caller '{caller.name}' may not ask model '{model}'")
        return caller
