"""The snapshots that the processes of a node share, so that each can show the whole node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from draftgate.gateway.dispatch.decisions import KEPT
from draftgate.gateway.state.commands import StoreCommand
from draftgate.gateway.state.store import InMemory
from draftgate.gateway.telemetry.live import Activity
from draftgate.gateway.telemetry.metrics import Row, add_snapshots, without_gauges
from draftgate.gateway.telemetry.worker_list import ProcessStreams

Shown: TypeAlias = Literal["decisions", "requests"]
"""A kind of records that each process of a node shows of all processes."""


class SharedRecord(msgspec.Struct, frozen=True, array_like=True):
    """A decision or a request of a process.

    Attributes:
        key: distinguishes the records of a run of a process.
        at_s: Unix time of the decision, or of the arrival of the request.
        json: the record as JSON.
    """

    key: str
    at_s: float
    tenant: str
    json: bytes


class ProcessSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state of a process.

    Attributes:
        decisions, requests: those that are new or have changed since the last snapshot, in order.
    """

    metrics: list[Row]
    activities: list[Activity]
    decisions: list[SharedRecord]
    streams: ProcessStreams
    requests: list[SharedRecord] = []


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


class ReadRecords(StoreCommand[list[tuple[float, bytes]]], frozen=True):
    """Return the Unix time and the JSON of the latest records of all other runs, newest first.

    Attributes:
        tenant: the tenant of the records, or None for all tenants.
    """

    kind: Shown
    run: str
    most: int
    tenant: str | None


class SharedSnapshots(InMemory):
    """The latest snapshot of each process."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[str, ProcessSnapshot]] = {}  # by process, with its run
        self._ended: list[Row] = []  # the counters of runs that have ended
        # The records by run and key.
        self._records: dict[Shown, dict[tuple[str, str], SharedRecord]] = {
            "decisions": {},
            "requests": {},
        }
        self.handlers = {
            ShareSnapshot: self._share,
            ReadMetrics: self._metrics,
            ReadActivities: lambda command: [
                one for snapshot in self._others(command.process) for one in snapshot.activities
            ],
            ReadStreams: lambda command: [one.streams for one in self._others(command.process)],
            ReadRecords: self._read_records,
        }

    def _share(self, command: ShareSnapshot) -> None:
        process, run = command.process, command.run
        before = self._latest.get(process)
        if before is not None and before[0] != run:
            self._ended = add_snapshots([self._ended, without_gauges(before[1].metrics)])
        self._latest[process] = run, command.snapshot
        self._keep("decisions", run, command.snapshot.decisions)
        self._keep("requests", run, command.snapshot.requests)

    def _keep(self, kind: Shown, run: str, changed: Iterable[SharedRecord]) -> None:
        kept = self._records[kind]
        kept.update({(run, one.key): one for one in changed})
        while len(kept) > KEPT:
            del kept[next(iter(kept))]

    def _metrics(self, _command: ReadMetrics) -> list[list[Row]]:
        return [self._ended, *(snapshot.metrics for _, snapshot in self._latest.values())]

    def _read_records(self, command: ReadRecords) -> list[tuple[float, bytes]]:
        found = [
            (one.at_s, one.json)
            for (owner, _), one in self._records[command.kind].items()
            if owner != command.run and command.tenant in {None, one.tenant}
        ]
        return sorted(found, reverse=True)[: command.most]

    def _others(self, process: str) -> list[ProcessSnapshot]:
        return [snapshot for name, (_, snapshot) in self._latest.items() if name != process]
