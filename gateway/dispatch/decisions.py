"""What was decided about requests, and from what: for people, for replays, for the page.

The latest decisions are kept; with a file all are written to it, a JSON object a line. They hold
what the policy saw and what it answered, nothing of a prompt or an output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.routing.types import Route
from draftgate.policies.types import RequestView, SpeculationPlan, WorkerLoad

KEPT: Final = 1000
"""Decisions that are kept: some minutes of a busy node, a megabyte."""

MOST_UNWRITTEN: Final = 100_000
"""Lines that wait for a disk which takes none; older ones are dropped then."""


class Decision(msgspec.Struct, frozen=True):
    """One decision.

    Attributes:
        request_id: of the response; a request has a decision for each of its prompts, and one more
            each time that another worker goes on with one.
        decided_s: Unix time.
        worker_id: where the request goes.
        request, load: what the policy saw.
        plan: what it answered.
        route: why it goes to that worker, and not to the others with room; None where there were
            none. If a reservation that knew all leases took another one of its offers, `worker_id`
            is that one.
        load_age_s: how old the load was, in seconds.
        degraded: whether the state store did not answer: what other gateways had sent meanwhile was
            not known.
    """

    request_id: str
    decided_s: float
    worker_id: str
    request: RequestView
    load: WorkerLoad
    plan: SpeculationPlan
    route: Route | None = None
    load_age_s: float = 0.0
    degraded: bool = False

    def under(self, policy: SpeculationPolicy) -> SpeculationPlan:
        """Return what a policy decides from the same inputs."""
        return policy.decide(self.request, self.load)


class DecisionList(msgspec.Struct):
    """The answer of `/decisions`, the newest first."""

    decisions: list[Decision]


class Decisions:
    """The decisions of a node. Use on the event loop's thread, but for `write`."""

    def __init__(self, path: Path | None, now_s: Callable[[], float]) -> None:
        """Keep the latest; append all to a file if there is a path.

        Args:
            now_s: the clock, in Unix time.
        """
        self._latest: deque[Decision] = deque(maxlen=KEPT)
        self._path = path
        self._now_s = now_s
        self._unwritten: deque[Decision] = deque(maxlen=MOST_UNWRITTEN)

    def record(
        self,
        request_id: str,
        worker_id: str,
        request: RequestView,
        load: WorkerLoad,
        plan: SpeculationPlan,
        route: Route | None = None,
        *,
        load_age_s: float = 0.0,
        degraded: bool = False,
    ) -> None:
        """Keep a decision."""
        now_s = self._now_s()
        decision = Decision(
            *(request_id, now_s, worker_id, request, load, plan, route, load_age_s, degraded)
        )
        self._latest.append(decision)
        if self._path is not None:
            self._unwritten.append(decision)

    def latest(self, most: int) -> list[Decision]:
        """Return the latest decisions, the newest first."""
        return [decision for _, decision in zip(range(most), reversed(self._latest), strict=False)]

    @property
    def unwritten(self) -> bool:
        """Whether `write` has something to do."""
        return bool(self._unwritten)

    def write(self) -> None:
        """Append what is new to the file. Blocks as files do: call it in a thread.

        Raises:
            OSError: the file cannot be written; what was to be is kept.
        """
        taken = [self._unwritten.popleft() for _ in range(len(self._unwritten))]
        if self._path is None or not taken:
            return
        try:
            with self._path.open("ab") as file:
                file.writelines(msgspec.json.encode(decision) + b"\n" for decision in taken)
        except OSError:
            self._unwritten.extendleft(reversed(taken))
            raise


def read_decisions(path: Path) -> Iterator[Decision]:
    """Yield the decisions of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is not a decision; the message says which.
    """
    decoder = msgspec.json.Decoder(Decision)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
