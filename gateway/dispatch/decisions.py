"""Recorded decisions about requests, with their inputs.

The latest decisions are in memory. All decisions are also written to a file, if configured, as one
JSON object per line. Decisions contain the inputs and the result of the policy, but no text.
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
"""Maximum decisions in memory, which cover a few minutes of a busy node in about a megabyte."""

MOST_UNWRITTEN: Final = 100_000
"""Maximum decisions kept while the file cannot be written. Older decisions are dropped."""


class Decision(msgspec.Struct, frozen=True):
    """One decision.

    Attributes:
        request_id: the id of the response. A request has one decision for each prompt, and one more
            for each resume.
        decided_s: Unix time.
        worker_id: the worker that gets the request.
        request, load: the inputs of the policy.
        plan: the result of the policy.
        route: the routing decision, or None without a choice. If the reservation chose another one
            of its offers, `worker_id` is that worker.
        load_age_s: age of the load in seconds.
        degraded: whether the state store did not respond, so that recent requests of other gateways
            were unknown.
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
        """Return the plan that a policy makes from the same inputs."""
        return policy.decide(self.request, self.load)


class DecisionList(msgspec.Struct):
    """The response of `/decisions`, newest first."""

    decisions: list[Decision]


class Decisions:
    """The decisions of a node.

    Use the object only on the thread of the event loop, except for `write`.
    """

    def __init__(self, path: Path | None, now_s: Callable[[], float]) -> None:
        """Keep the latest decisions.

        Args:
            path: the file for all decisions, or None.
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
        """Record a decision."""
        now_s = self._now_s()
        decision = Decision(
            *(request_id, now_s, worker_id, request, load, plan, route, load_age_s, degraded)
        )
        self._latest.append(decision)
        if self._path is not None:
            self._unwritten.append(decision)

    def latest(self, most: int) -> list[Decision]:
        """Return the latest decisions, newest first."""
        return [decision for _, decision in zip(range(most), reversed(self._latest), strict=False)]

    @property
    def unwritten(self) -> bool:
        """Whether decisions wait to be written."""
        return bool(self._unwritten)

    def write(self) -> None:
        """Append new decisions to the file.

        The method blocks, so call it in a thread.

        Raises:
            OSError: the file cannot be written, and the decisions are kept.
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
    """Yield the decisions in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a decision. The message names the line.
    """
    decoder = msgspec.json.Decoder(Decision)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
