"""The keys, the spending and the usage of tenants in memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from draftgate.gateway.state.commands import (
    ExchangeSpending,
    ListUsage,
    PutUsage,
    ReadKeys,
    WriteKeys,
)
from draftgate.gateway.state.store import InMemory


class MemoryAccounting(InMemory):
    """Keys, spending and usage in this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty.

        Args:
            clock: a monotonic clock, in seconds.
        """
        self._clock = clock
        self._keys: tuple[str, str | None] = ("", None)  # with their revision
        self._spending: dict[str, tuple[float, dict[str, int]]] = {}  # end, totals by gateway
        self._usage: dict[str, tuple[float, dict[str, str]]] = {}  # end, counts by gateway
        self.handlers = {
            ReadKeys: self.read_keys,
            WriteKeys: self.write_keys,
            ExchangeSpending: self.exchange_spending,
            PutUsage: self.put_usage,
            ListUsage: self.list_usage,
        }

    def read_keys(self, command: ReadKeys) -> tuple[str, str | None]:
        """Return the keys, if they have another revision."""
        revision, keys = self._keys
        return revision, None if revision == command.revision else keys

    def write_keys(self, command: WriteKeys) -> bool:
        """Replace the keys."""
        if self._keys[0] != command.expected:
            return False
        self._keys = command.revision, command.keys
        return True

    def exchange_spending(self, command: ExchangeSpending) -> tuple[int, ...]:
        """Keep the totals of a gateway, and return the sums."""
        now_s, sums = self._clock(), []
        self._spending = {name: kept for name, kept in self._spending.items() if kept[0] > now_s}
        for name, total, ttl_s in command.totals:
            _, of_gateways = self._spending.get(name, (0.0, {}))
            of_gateways[command.source] = max(total, of_gateways.get(command.source, 0))
            self._spending[name] = now_s + ttl_s, of_gateways
            sums.append(sum(of_gateways.values()))
        return tuple(sums)

    def put_usage(self, command: PutUsage) -> None:
        """Replace what a gateway has counted in a period."""
        now_s = self._clock()
        self._usage = {name: kept for name, kept in self._usage.items() if kept[0] > now_s}
        _, of_gateways = self._usage.get(command.period, (0.0, {}))
        of_gateways[command.source] = command.counts
        self._usage[command.period] = now_s + command.ttl_s, of_gateways

    def list_usage(self, command: ListUsage) -> tuple[str, ...]:
        """Return what the gateways have counted in a period."""
        end_s, of_gateways = self._usage.get(command.period, (0.0, {}))
        return tuple(of_gateways.values()) if end_s > self._clock() else ()
