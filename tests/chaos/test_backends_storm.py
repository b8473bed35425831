"""Every backend under everything at once, for some seconds; soak_backends.py does the same for minutes."""

from __future__ import annotations

from chaos.soak_backends import soak

SECONDS = 10.0


async def test_nothing_else_is_lost_and_nothing_is_left_behind() -> None:
    seen = await soak(SECONDS, seed=7)
    print(seen)
    for kind in ("calm", "victim", "ensemble", "sequence", "call", "cached", "reload of the calm"):
        assert seen[f"{kind} OK"], kind
    assert seen["stream whole"]
    assert seen["killed"]
    assert seen["calm OK"] == sum(count for kind, count in seen.items() if kind.startswith("calm "))
