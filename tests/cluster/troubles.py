"""What befalls nodes of a cluster: workers killed and stopped, gateways restarted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.cluster.nodes import Cluster, NodeProcess, eventually

FREEZE_S = (1.0, 9.0)
"""How long workers are stopped: for less than the 3 s of silence after which a gateway takes a peer
for lost, and for more."""


@dataclass
class Troubles:
    """Makes them, and notes when (seconds of `now_s`)."""

    cluster: Cluster
    now_s: Callable[[], float]
    rng: random.Random
    made: list[tuple[float, str]] = field(default_factory=list)

    async def kill(self, worker: NodeProcess) -> None:
        """Kill a worker while it runs something, and start it again."""
        await self._until_busy(worker)
        await worker.kill()
        self._note("killed", worker)
        await worker.start()
        await worker.until_ready()
        self._note("is back", worker)

    async def stop(self, worker: NodeProcess) -> None:
        """Stop a worker while it runs something, and let it go on some seconds later."""
        await self._until_busy(worker)
        worker.freeze()
        self._note("stopped", worker)
        await asyncio.sleep(self.rng.uniform(*FREEZE_S))
        worker.thaw()
        self._note("goes on", worker)

    async def restart(self, node: NodeProcess) -> None:
        """Stop a node with requests as an operator does, which must end well; start it again."""
        await self._until_busy(node)
        self._note("terminated", node)
        assert await node.stop() == 0, node.told[-4000:]
        self._note("ended", node)
        await node.start()
        await node.until_ready()
        self._note("is back", node)

    async def round(self, number: int) -> None:
        """Make all three, each to another node than in the round before."""
        workers, gateways = self.cluster.workers, self.cluster.gateways
        killing = asyncio.create_task(self.kill(workers[number % len(workers)]))
        await self.stop(workers[(number + 1) % len(workers)])
        await self.restart(gateways[number % len(gateways)])
        await killing

    async def _until_busy(self, node: NodeProcess) -> None:
        async def busy() -> bool:
            return await node.in_flight() > 0

        await eventually(busy)

    def _note(self, what: str, node: NodeProcess) -> None:
        self.made.append((round(self.now_s(), 2), f"{node.name} {what}"))
