"""The snapshots that the processes of a node share, so that each can show the whole node."""

from __future__ import annotations

import msgspec

from draftgate.gateway.dispatch.decisions import KEPT
from draftgate.gateway.state.commands import StoreCommand
from draftgate.gateway.state.store import InMemory
from draftgate.gateway.telemetry.live import Activity
from draftgate.gateway.telemetry.metrics import Row, add_snapshots, without_gauges
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


class ShareSnapshot(StoreCommand[None], frozen=True):
    """Replace the snapshot of a process.

    Attributes:
        run: an id of this run of the process. The counters of its earlier runs are kept.
    """

    process: str
    run: str
    snapshot: ProcessSnapshot


class ReadMetrics(StoreCommand[list[list[Row]]], frozen=True):
    """Return the metrics of all processes, and of runs that have ended."""


class ReadActivities(StoreCommand[list[Activity]], frozen=True):
    """Return the activities of all other processes."""

    process: str


class ReadStreams(StoreCommand[list[ProcessStreams]], frozen=True):
    """Return the streams of all other processes."""

    process: str


class ReadDecisions(StoreCommand[list[tuple[float, bytes]]], frozen=True):
    """Return the Unix time and the JSON of the latest decisions of all other runs, newest first.

    Attributes:
        tenant: the tenant of the decisions, or None for all tenants.
    """

    run: str
    most: int
    tenant: str | None


class SharedSnapshots(InMemory):
    """The latest snapshot of each process."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[str, ProcessSnapshot]] = {}  # by process, with its run
        self._ended: list[Row] = []  # the counters of runs that have ended
        self._decisions: dict[tuple[str, str], SharedDecision] = {}  # by run and key
        self.handlers = {
            ShareSnapshot: self._share,
            ReadMetrics: self._metrics,
            ReadActivities: lambda command: [
                one for snapshot in self._others(command.process) for one in snapshot.activities
            ],
            ReadStreams: lambda command: [one.streams for one in self._others(command.process)],
            ReadDecisions: self._read_decisions,
        }

    def _share(self, command: ShareSnapshot) -> None:
        process, run = command.process, command.run
        before = self._latest.get(process)
        if before is not None and before[0] != run:
            self._ended = add_snapshots([self._ended, without_gauges(before[1].metrics)])
        self._latest[process] = run, command.snapshot
        self._decisions.update({(run, one.key): one for one in command.snapshot.decisions})
        while len(self._decisions) > KEPT:
            del self._decisions[next(iter(self._decisions))]

    def _metrics(self, _command: ReadMetrics) -> list[list[Row]]:
        return [self._ended, *(snapshot.metrics for _, snapshot in self._latest.values())]

    def _read_decisions(self, command: ReadDecisions) -> list[tuple[float, bytes]]:
        found = [
            (one.decided_s, one.json)
            for (owner, _), one in self._decisions.items()
            if owner != command.run and command.tenant in {None, one.tenant}
        ]
        return sorted(found, reverse=True)[: command.most]

    def _others(self, process: str) -> list[ProcessSnapshot]:
        return [snapshot for name, (_, snapshot) in self._latest.items() if name != process]
