"""Failures of a cluster's nodes: killed and paused workers, and restarted gateways."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.cluster.nodes import Cluster, NodeProcess, eventually

FREEZE_S = (1.0, 9.0)
"""Shortest and longest pause. A peer counts as lost after 3 s of silence."""


@dataclass
class NodeFailures:
    """A source of failures that records their times, in seconds of `now_s`."""

    cluster: Cluster
    now_s: Callable[[], float]
    rng: random.Random
    events: list[tuple[float, str]] = field(default_factory=list)

    async def kill(self, worker: NodeProcess) -> None:
        """Kill a busy worker and restart it."""
        await self._until_busy(worker)
        await worker.kill()
        self._note("killed", worker)
        await worker.start()
        await worker.until_ready()
        self._note("restarted", worker)

    async def stop(self, worker: NodeProcess) -> None:
        """Pause a busy worker and resume it some seconds later."""
        await self._until_busy(worker)
        worker.freeze()
        self._note("paused", worker)
        await asyncio.sleep(self.rng.uniform(*FREEZE_S))
        worker.thaw()
        self._note("resumed", worker)

    async def restart(self, node: NodeProcess) -> None:
        """Restart a node with open requests and check that it exits cleanly."""
        await self._until_busy(node)
        self._note("terminated", node)
        assert await node.stop() == 0, node.log_text[-4000:]
        self._note("ended", node)
        await node.start()
        await node.until_ready()
        self._note("restarted", node)

    async def round(self, number: int) -> None:
        """Cause all three failures, each on another node than in the previous round."""
        workers, gateways = self.cluster.workers, self.cluster.gateways
        killing = asyncio.create_task(self.kill(workers[number % len(workers)]))
        await self.stop(workers[(number + 1) % len(workers)])
        await self.restart(gateways[number % len(gateways)])
        await killing

    async def _until_busy(self, node: NodeProcess) -> None:
        async def busy() -> bool:
            return await node.in_flight() > 0

        await eventually(busy)

    def _note(self, event: str, node: NodeProcess) -> None:
        self.events.append((round(self.now_s(), 2), f"{node.name} {event}"))
