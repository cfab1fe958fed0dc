"""Connections in memory that lose their packets or break when a run decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.memory_network import receive


class WireEnd(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire
        self._protocol: asyncio.BaseProtocol = asyncio.Protocol()
        self._closed = False

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self._closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closed:
            self._wire.carry(self, lambda other: other.receive(bytes(data)))

    def close(self) -> None:
        if not self._closed:
            self._wire.carry(self, lambda other: other.lose(None))
            self.lose(None)

    def abort(self) -> None:
        self.close()

    def receive(self, data: bytes) -> None:
        """Pass data to the protocol."""
        if not self._closed:
            receive(self._protocol, data)

    def lose(self, error: Exception | None) -> None:
        """End the connection at this end."""
        if not self._closed:
            self._closed = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, error)


class Wire:
    """A connection between a gateway and a worker."""

    def __init__(self) -> None:
        self.ends = WireEnd(self), WireEnd(self)
        self._held: list[tuple[WireEnd, Callable[[WireEnd], None]]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether an end is open."""
        return not all(end.is_closing() for end in self.ends)

    def carry(self, sender: WireEnd, action: Callable[[WireEnd], None]) -> None:
        """Deliver an action to the other end, in order."""
        (other,) = (end for end in self.ends if end is not sender)
        if self._held is not None:
            self._held.append((other, action))
        else:
            asyncio.get_running_loop().call_soon(action, other)

    def freeze(self) -> None:
        """Hold everything back."""
        self._held = self._held or []

    def thaw(self) -> None:
        """Deliver what was held back."""
        held, self._held = self._held or [], None
        for other, action in held:
            asyncio.get_running_loop().call_soon(action, other)

    def cut(self) -> None:
        """Reset the connection at both ends."""
        for end in self.ends:
            end.lose(ConnectionResetError())
