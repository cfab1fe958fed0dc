"""The other processes of a node, which share what its metrics and its live page show."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from draftgate.gateway.cluster.snapshots import (
    ProcessSnapshot,
    ReadActivities,
    ReadMetrics,
    ReadRecords,
    ReadStreams,
    SharedRecord,
    ShareSnapshot,
    Shown,
)
from draftgate.gateway.dispatch.decisions import Decision, Decisions
from draftgate.gateway.logs import log
from draftgate.gateway.state.commands import StoreCommand, T
from draftgate.gateway.state.local.store import LocalStore
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.telemetry.live import Activity, Live
from draftgate.gateway.telemetry.metrics import Row
from draftgate.gateway.telemetry.request_facts import LatestRequests, RequestFacts
from draftgate.gateway.telemetry.worker_list import ProcessStreams


class Siblings:
    """The other processes of a node, as one of them sees them.

    What it returns is at most about a second old. Except for the metrics, it is empty if the parent
    does not respond.
    """

    def __init__(
        self,
        path: Path,
        process: str,
        metrics: Callable[[], list[Row]],
        live: Live,
        decisions: Decisions,
        requests: LatestRequests,
        own_streams: Callable[[], ProcessStreams],
    ) -> None:
        """Share what one process shows over a socket.

        Args:
            path: path of the socket of the parent.
            process: name of this process.
            metrics: a function that returns the metrics of this process.
            own_streams: a function that returns the streams of this process.
        """
        self._store = LocalStore(path)
        self._process = process
        self._run = secrets.token_hex(8)
        self._metrics = metrics
        self._live = live
        self._decisions = decisions
        self._requests = requests
        self._own_streams = own_streams

    async def share(self) -> None:
        """Send a snapshot of this process to the others. Errors are logged."""
        snapshot = ProcessSnapshot(
            self._metrics(),
            self._live.activities,
            [_shared(*one) for one in self._decisions.take_changed()],
            self._own_streams(),
            [_shared_request(one) for one in self._requests.take_changed()],
        )
        try:
            await self._store.call(ShareSnapshot(self._process, self._run, snapshot))
        except StoreError as error:
            log(logging.WARNING, "cannot share metrics with other processes", reason=str(error))

    async def metrics(self) -> list[list[Row]]:
        """Return the metrics of all processes, as the parent knows them.

        Consecutive scrapes reach different processes. A counter would decrease if each process
        added its present value to older values of the others. The process therefore sends its own
        metrics first, and shows only values that the parent has.

        Raises:
            StoreError: the parent does not respond.
        """
        await self.share()
        return await self._store.call(ReadMetrics())

    async def activities(self) -> list[Activity]:
        """Return the activities of the others."""
        return await self._found(ReadActivities(self._process))

    async def streams(self) -> list[ProcessStreams]:
        """Return the streams of the others."""
        return await self._found(ReadStreams(self._process))

    async def records(
        self, kind: Shown, most: int, tenant: str | None
    ) -> list[tuple[float, bytes]]:
        """Return the latest records of the others with their Unix time, newest first.

        Args:
            tenant: the tenant of the records, or None for all tenants.
        """
        return await self._found(ReadRecords(kind, self._run, most, tenant))

    async def _found(self, command: StoreCommand[list[T]]) -> list[T]:
        try:
            return await self._store.call(command)
        except StoreError:
            return []


def _shared(tenant: str, decision: Decision) -> SharedRecord:
    key = f"{decision.request_id} {decision.decided_s} {decision.worker_id}"
    return SharedRecord(key, decision.decided_s, tenant, msgspec.json.encode(decision))


def _shared_request(facts: RequestFacts) -> SharedRecord:
    found = facts.recorded()
    key = f"{facts.client_id} {facts.arrival_s}"
    return SharedRecord(key, found.record.started_s, facts.account, msgspec.json.encode(found))
