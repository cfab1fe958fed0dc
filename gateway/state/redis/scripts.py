"""The scripts that run in the Redis server, as texts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from draftgate.gateway.state.store import FORGET_S

_LUA: Final = Path(__file__).with_name("lua")

NAMES: Final = ("report", "withdraw", "snapshot", "reserve", "renew", "release")
"""What there is to call; each file says what it takes and returns."""


def read_lua(name: str) -> str:
    """Return one of the files."""
    return (_LUA / f"{name}.lua").read_text(encoding="utf-8")


def script_text(name: str, clock: str) -> str:
    """Return a script with all that it uses.

    Args:
        clock: Lua that defines `now_us()`.
    """
    forget = f"local FORGET_MS = {round(FORGET_S * 1000)}\n"
    return "\n".join((clock, forget, read_lua("common"), read_lua(name)))
