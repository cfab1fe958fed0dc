"""The snapshots that the processes of a node share, so that each can show the whole node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

import msgspec

from draftgate.gateway.dispatch.decisions import KEPT
from draftgate.gateway.state.local.messages import METHODS, Method, method_of
from draftgate.gateway.state.local.server import SharedStores
from draftgate.gateway.telemetry.live import Activity
from draftgate.gateway.telemetry.metric_snapshots import Row, add_snapshots, without_gauges
from draftgate.gateway.telemetry.worker_list import ProcessStreams


class SharedDecision(msgspec.Struct, frozen=True, array_like=True):
    """A decision of a process.

    Attributes:
        key: distinguishes the decisions of a run of a process.
        json: the decision as JSON.
    """

    key: str
    decided_s: float
    tenant: str
    json: bytes


class ProcessSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state of a process.

    Attributes:
        decisions: the decisions that are new or have changed since the last snapshot, in order.
    """

    metrics: list[Row]
    activities: list[Activity]
    decisions: list[SharedDecision]
    streams: ProcessStreams


class SharedSnapshots:
    """The latest snapshot of each process. Its calls never suspend."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[str, ProcessSnapshot]] = {}  # by process, with its run
        self._ended: list[Row] = []  # the counters of runs that have ended
        self._decisions: dict[tuple[str, str], SharedDecision] = {}  # by run and key

    async def share(self, process: str, run: str, snapshot: ProcessSnapshot) -> None:
        """Replace the snapshot of a process.

        Args:
            run: an id of this run of the process. The counters of its earlier runs are kept.
        """
        before = self._latest.get(process)
        if before is not None and before[0] != run:
            self._ended = add_snapshots([self._ended, without_gauges(before[1].metrics)])
        self._latest[process] = run, snapshot
        self._decisions.update({(run, one.key): one for one in snapshot.decisions})
        while len(self._decisions) > KEPT:
            del self._decisions[next(iter(self._decisions))]

    async def metrics(self) -> list[list[Row]]:
        """Return the metrics of all processes, and of runs that have ended."""
        return [self._ended, *(snapshot.metrics for _, snapshot in self._latest.values())]

    async def activities(self, process: str) -> list[Activity]:
        """Return the activities of all other processes."""
        return [one for snapshot in self._others(process) for one in snapshot.activities]

    async def streams(self, process: str) -> list[ProcessStreams]:
        """Return the streams of all other processes."""
        return [snapshot.streams for snapshot in self._others(process)]

    async def decisions(self, run: str, most: int, tenant: str | None) -> list[tuple[float, bytes]]:
        """Return the latest decisions of all other runs, newest first.

        Args:
            tenant: the tenant of the decisions, or None for all tenants.

        Returns:
            The Unix time and the JSON of each decision.
        """
        found = [
            (one.decided_s, one.json)
            for (owner, _), one in self._decisions.items()
            if owner != run and tenant in {None, one.tenant}
        ]
        return sorted(found, reverse=True)[:most]

    def _others(self, process: str) -> list[ProcessSnapshot]:
        return [snapshot for name, (_, snapshot) in self._latest.items() if name != process]


SNAPSHOT_METHODS: Final = {
    "snapshots.share": method_of(tuple[str, str, ProcessSnapshot], None),
    "snapshots.metrics": method_of(tuple[()], list[list[Row]]),
    "snapshots.activities": method_of(tuple[str], list[Activity]),
    "snapshots.streams": method_of(tuple[str], list[ProcessStreams]),
    "snapshots.decisions": method_of(tuple[str, int, str | None], list[tuple[float, bytes]]),
}
"""The methods of `SharedSnapshots` that the processes call."""


@dataclass(slots=True)
class NodeStores(SharedStores):
    """The stores and the snapshots that the processes of a node share."""

    methods: ClassVar[Mapping[str, Method]] = {**METHODS, **SNAPSHOT_METHODS}

    snapshots: SharedSnapshots = field(default_factory=SharedSnapshots)
