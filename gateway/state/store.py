"""The protocols of stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self, TypeAlias

from draftgate.gateway.state.commands import NO_FALLBACK, CommandType, StoreCommand, T


class StoreError(Exception):
    """The store did not respond.

    The store may still have executed the command.
    """


class RemoteStore(Protocol):
    """A store in another process, which may not respond."""

    async def call(self, command: StoreCommand[T]) -> T:
        """Return the result of a command.

        Raises:
            StoreError: the store did not respond.
        """
        ...

    async def warm_up(self) -> None:
        """Prepare for the first requests, so that none of them waits for a new connection."""
        ...

    async def close(self) -> None:
        """Close all connections.

        The method is idempotent.
        """
        ...


class Store(RemoteStore, Protocol):
    """State shared by the gateways and workers of a pool.

    `call` raises StoreError only for a command without a fallback (`StoreCommand.fallback`).
    """

    @property
    def outage(self) -> str | None:
        """The reason why the store is not used at present, or None while it works."""
        ...

    @property
    def memory(self) -> InMemory | None:
        """The store itself if it is in memory, to execute commands without waiting."""
        ...

    def post(self, command: StoreCommand[None]) -> None:
        """Execute `ReleaseLeases` or `SettleQuotas` soon, and do not wait for it."""
        ...


Handlers: TypeAlias = dict[CommandType, Callable[[Any], Any]]
"""The functions that execute each type of command."""


class InMemory:
    """A store in this process, which executes commands without waiting.

    Attributes:
        handlers: the functions that execute its commands.
    """

    handlers: Handlers
    outage = None

    @property
    def memory(self) -> Self | None:
        """The store, because it is in memory (`Store.memory`)."""
        return self

    def apply(self, command: StoreCommand[T]) -> T:
        """Execute a command, and return its result."""
        result: T = self.handlers[type(command)](command)
        return result

    async def call(self, command: StoreCommand[T]) -> T:
        """Return the result of a command, as `Store.call` describes."""
        return self.apply(command)

    def post(self, command: StoreCommand[None]) -> None:
        """Execute a command."""
        self.apply(command)

    async def warm_up(self) -> None:
        """Do nothing, because the store has no connections."""

    async def close(self) -> None:
        """Do nothing, because the store has no connections."""


def fallback(command: StoreCommand[T], error: StoreError) -> T:
    """Return the result of a command to which the store did not respond.

    Raises:
        StoreError: the given error, because the command has no fallback.
    """
    if command.fallback is NO_FALLBACK:
        raise error
    result: T = command.fallback
    return result
