"""The states of a node, their transitions, and the errors of states that accept no requests.

    starting --> ready --> draining
        |          |          ^
        +-> failed <+         |
              +---------------+

A failed node still responds to `/health` with the reason. It then drains and stops. Failed workers
never recover. A node fails with its last worker, or if a worker cannot start.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Final

from draftgate.gateway.errors import Draining, Starting, WorkerFailed


class NodeState(StrEnum):
    """The state of a node."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


TRANSITIONS: Final[dict[NodeState, frozenset[NodeState]]] = {
    NodeState.STARTING: frozenset({NodeState.READY, NodeState.FAILED, NodeState.DRAINING}),
    NodeState.READY: frozenset({NodeState.DRAINING, NodeState.FAILED}),
    NodeState.FAILED: frozenset({NodeState.DRAINING}),
    NodeState.DRAINING: frozenset(),
}

RETRY_STARTING_S: Final = 5
RETRY_DRAINING_S: Final = 1
"""A short delay, because a load balancer sends the retry to another node."""


class InFlight:
    """The client requests that have arrived and not ended.

    Attributes:
        requests: their number.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._idle: asyncio.Event | None = None  # if something waits for it

    def add(self) -> None:
        """Count a request."""
        self.requests += 1

    def remove(self) -> None:
        """Count the end of a request."""
        self.requests -= 1
        if self._idle is not None and self.requests == 0:
            self._idle.set()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        while self.requests:
            self._idle = asyncio.Event()
            await self._idle.wait()


class Lifecycle:
    """The state of this node, with the reason of a failure and the requests in flight."""

    def __init__(self) -> None:
        self.state = NodeState.STARTING
        self.failure: str | None = None
        self.in_flight = InFlight()

    def move_to(self, state: NodeState, failure: str | None = None) -> None:
        """Change the state, unless the node is already in this state.

        Raises:
            RuntimeError: the table has no such transition.
        """
        if state is self.state:
            return
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a node that is {self.state} cannot become {state}")
        self.state = state
        self.failure = failure or self.failure

    def note_failure(self, failure: str | None) -> None:
        """Record a failure of the workers, and enter the failed state.

        A draining node records the failure without changing its state.
        """
        if failure is None or self.failure is not None:
            return
        self.failure = failure
        if NodeState.FAILED in TRANSITIONS[self.state]:
            self.move_to(NodeState.FAILED)

    def require_ready(self) -> None:
        """Raise a subclass of `Unavailable` unless the node accepts requests."""
        if self.state is NodeState.READY:
            return
        if self.state is NodeState.STARTING:
            raise Starting("the model is still loading", retry_after_s=RETRY_STARTING_S)
        if self.state is NodeState.DRAINING:
            raise Draining("this node is shutting down", retry_after_s=RETRY_DRAINING_S)
        raise WorkerFailed(f"the worker failed: {self.failure}", retry_after_s=RETRY_STARTING_S)
