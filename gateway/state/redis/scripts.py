"""Scripts that run in Redis, each in one round trip, on the keys of a pool."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from redis.exceptions import RedisError

from draftgate.gateway.state.redis.client import BROKEN, Connected
from draftgate.gateway.state.store import StoreError

_LUA: Final = Path(__file__).with_name("lua")


class Scripts:
    """The scripts of a store."""

    def __init__(
        self,
        connected: Connected,
        pool: str,
        names: Iterable[str],
        helpers: Iterable[str],
        *,
        clock: str = "",
        constants: str = "",
    ) -> None:
        """Use a client, which is closed with these scripts.

        Args:
            pool: name of the pool, which is part of the prefix of all keys.
            names: the names of the scripts in `lua/`.
            helpers: the names of the files with the helpers of these scripts, in order.
            clock: Lua source that replaces `lua/clock.lua`.
            constants: Lua source in front of the helpers.
        """
        self._client = connected.client
        self._closing = connected.closing
        self._pool = f"draftgate:{{{pool}}}:"
        head = "\n".join((clock or _read_lua("clock"), constants, *map(_read_lua, helpers), ""))
        self._scripts = {
            name: self._client.register_script(head + _read_lua(name)) for name in names
        }

    async def run(self, name: str, args: Iterable[Any]) -> Any:
        """Run a script, and return its result.

        Raises:
            StoreError: the server did not respond, or responded with an error.
        """
        try:
            return await self._scripts[name]((self._pool,), args)
        except (RedisError, OSError, *BROKEN) as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error

    async def load(self) -> None:
        """Load all scripts into the server.

        Raises:
            StoreError: the server did not respond, or responded with an error.
        """
        try:
            for script in self._scripts.values():
                await self._client.script_load(script.script)
        except (RedisError, OSError, *BROKEN) as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close all connections."""
        for close in self._closing:
            await close()


def _read_lua(name: str) -> str:
    return (_LUA / f"{name}.lua").read_text(encoding="utf-8")
