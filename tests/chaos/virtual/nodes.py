"""Nodes in virtual time: the code of a pool except for HTTP, sockets and devices.

A worker node has a simulated worker, a heartbeat, and the sessions of its peers. A gateway has a
fleet, a dispatcher, a heartbeat and the discovery of workers. They share a memory store, each over
its own guarded connection, and are linked by wires in memory. Both exist for one life: a restart
makes another object at the same address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.exchange import KvOperation, KvResult
from draftgate.backends.kv_transfer.transfer import operate_on
from draftgate.backends.peer import backend as peer_backend
from draftgate.backends.peer import link as peer_link
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.channel import WORKER_PATH
from draftgate.backends.peer.tokenizer import Tokenizers
from draftgate.backends.peer.upgrade import CONNECT_S
from draftgate.backends.remote_worker import ALIVE
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules, build_dispatcher, loop_time_s
from draftgate.gateway.cluster.heartbeat import Heartbeat
from draftgate.gateway.cluster.members import Members
from draftgate.gateway.dispatch.admission import Bounds
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.http.peers import session as peer_session
from draftgate.gateway.http.peers.session import PeerSession
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.values import WorkerReport, new_epoch
from draftgate.gateway.tracing import Tracing
from draftgate.policies.registry import speculation_policy
from tests.chaos.virtual.wire import Wire
from tests.gateway.flaky_store import FlakyStore, guarded

REPORT_S = 1.0
"""Interval of reports over links. Ten reports a second would take most of the time of a run."""

RULES = WaitingRules(admission="none", bounds=Bounds(timeout_s=300.0), shared=True)

GONE = "the process was killed"


SLOWDOWN = 10.0
"""How much slower devices are than their profile, so that few steps last as long as a fault."""


class PausableSim(SimBackend):
    """A simulated worker whose device is slow, and pauses with its process."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.runs = asyncio.Event()
        self.runs.set()

    def _run_after(self, seconds: float) -> asyncio.Handle:
        return super()._run_after(SLOWDOWN * seconds)

    def _run(self) -> None:
        if self.runs.is_set():
            super()._run()
        else:
            self._turn = asyncio.create_task(self._continue())

    async def _continue(self) -> None:
        await self.runs.wait()
        super()._run()


class SharedMemory:
    """The store of a pool, with its own clock.

    Attributes:
        clock_step_s: how far the clock of the store is ahead.
        num_nodes: number of nodes, as each snapshot reports it.
    """

    def __init__(self, num_nodes: int) -> None:
        self.clock_step_s = 1e6  # so that a step back never gives a negative time
        self.num_nodes = num_nodes
        self.remotes: list[FlakyStore] = []
        self.forget()

    def forget(self) -> None:
        """Delete the memory of the store."""
        self.inner = MemoryStore(lambda: loop_time_s() + self.clock_step_s)
        for remote in self.remotes:
            remote.inner = self.inner

    def connect(self) -> tuple[FlakyStore, GuardedStore]:
        """Return a new connection, and the guarded store that uses it."""
        remote = FlakyStore()
        remote.inner, remote.gateways = self.inner, self.num_nodes
        self.remotes.append(remote)
        return remote, guarded(remote)

    def disconnect(self, remote: FlakyStore) -> None:
        """End a connection, so that calls over it have no effect."""
        remote.failure = GONE
        self.remotes.remove(remote)


class VirtualNode:
    """What worker nodes and gateways have in common."""

    def __init__(self, name: str, memory: SharedMemory, fleet: Fleet, config: WorkerConfig) -> None:
        self.name = name
        self.url = f"http://{name}"
        self.memory = memory
        self.fleet = fleet
        self.remote, self.store = memory.connect()
        self.lifecycle = Lifecycle()
        self.lifecycle.move_to(NodeState.READY)
        self.dispatcher = build_dispatcher(
            *(fleet, self.store, self.lifecycle, Decisions(None, loop_time_s)),
            *(speculation_policy(config.speculation), RULES),
            quotas={},
            draw=Random(name).random,
        )
        self.tracing = Tracing()
        self.tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Start a task that ends with the node."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self.remote.failure == GONE

    async def _end(self) -> None:
        """End the tasks and the connection to the store, without the effects of a shutdown."""
        self.memory.disconnect(self.remote)
        for task in tuple(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(set(self.tasks))
        await self.store.close()

    @property
    def is_idle(self) -> bool:
        """Whether the node has no requests and no reservations."""
        reserved = sum(worker.reserved_tokens for worker in self.fleet.workers)
        return not (reserved or len(self.dispatcher.queue) or self.lifecycle.in_flight.requests)


class WorkerNode(VirtualNode):
    """A node with a simulated worker."""

    def __init__(self, name: str, memory: SharedMemory, config: WorkerConfig) -> None:
        super().__init__(name, memory, Fleet(lambda: PausableSim, [config]), config)
        self.reachable = asyncio.Event()
        self.reachable.set()
        self._wires: list[Wire] = []
        self._heartbeat = Heartbeat(self.fleet, self.store, self.dispatcher)
        self._heartbeat.url = self.url

    @property
    def backend(self) -> PausableSim:
        """The worker."""
        backend = self.fleet.own[0].backend
        assert isinstance(backend, PausableSim)
        return backend

    @property
    def worker_id(self) -> str:
        """The id of the worker in the pool."""
        return f"{self.name}-0"

    @property
    def is_idle(self) -> bool:
        """Whether the node has no requests, and the worker no sequence, block or hold."""
        load, blocks = self.backend.load(), self.backend._exchange._blocks
        blocks.expire_holds(loop_time_s())
        used = load.kv_blocks_total - load.kv_blocks_free
        busy = load.running + load.waiting + load.paused + used + blocks._cache.num_held
        return super().is_idle and not busy

    async def start(self, unix_s: float) -> None:
        """Start the worker, in an epoch that begins at a time of the clock of its machine."""
        factory = PausableSim
        await self.fleet.start_with(factory, self.name, new_epoch(unix_s, "0"))
        self.spawn(self._heartbeat.run())

    def connect(self) -> Wire:
        """Return a new connection to the worker, and serve it."""
        if self.lifecycle.state is not NodeState.READY or self.backend.failure is not None:
            raise BackendFailed("it accepts no requests")
        wire = Wire()
        self._wires = [one for one in self._wires if one.is_open] + [wire]
        session = PeerSession(self, self.dispatcher, self.fleet.own[0])  # type: ignore[arg-type]
        self.spawn(session.run(SimpleNamespace(transport=wire.ends[1])))  # type: ignore[arg-type]
        return wire

    def freeze_wires(self) -> None:
        """Lose all packets between the node and its peers."""
        self.reachable.clear()
        for wire in self._wires:
            wire.freeze()

    def thaw_wires(self) -> None:
        """Deliver what was lost, as a network does with repetitions."""
        self.reachable.set()
        for wire in self._wires:
            wire.thaw()

    def reset_wires(self) -> None:
        """Reset all connections to the node."""
        for wire in self._wires:
            wire.cut()

    async def pause(self, seconds: float) -> None:
        """Pause the process."""
        self.backend.runs.clear()
        self.remote.delay_s = seconds
        self.freeze_wires()
        await asyncio.sleep(seconds)
        self.backend.runs.set()
        self.remote.delay_s = 0.0
        self.thaw_wires()

    async def kill(self) -> None:
        """End the node at once."""
        self.reset_wires()
        await self.fleet.stop()
        await self._end()

    async def drain(self, timeout_s: float) -> None:
        """End the node in order, as SIGTERM does."""
        await self._heartbeat.leave()
        self.lifecycle.move_to(NodeState.DRAINING)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.lifecycle.in_flight.drained(), timeout_s)
        await self.fleet.stop()
        await asyncio.sleep(0.1)  # the sessions send the last updates
        await self.kill()


class VirtualPeer(PeerBackend):
    """A link to a worker node, whose KV blocks are read without a connection of their own."""

    def __init__(self, nodes: Mapping[str, WorkerNode], report: WorkerReport, **settings: Any):
        super().__init__(report.address, None, report.epoch, clock=loop_time_s, **settings)
        self._nodes = nodes

    async def operate(self, operation: KvOperation) -> KvResult:
        """Run an operation on the blocks of the worker, once it can be reached."""
        node = _node_at(self._nodes, self.url)
        await node.reachable.wait()
        if self._link is None:
            raise BackendFailed("the peer is lost")
        return await operate_on(node.backend, operation)

    async def fetch_blocks(self, *_arguments: Any, **_settings: Any) -> None:
        """Return None, so that the gateway passes the blocks on."""


class GatewayNode(VirtualNode):
    """A node without workers, which finds those of other nodes."""

    def __init__(
        self,
        name: str,
        memory: SharedMemory,
        config: WorkerConfig,
        nodes: Mapping[str, WorkerNode],
        tokenizers: Tokenizers,
    ) -> None:
        super().__init__(name, memory, Fleet(lambda: PausableSim, ()), config)
        reach = partial(VirtualPeer, nodes, tokenizers=tokenizers)
        self.members = Members(
            self.fleet, self.store, reach, self.dispatcher.queue.dispatch_waiting
        )
        self._heartbeat = Heartbeat(self.fleet, self.store, self.dispatcher, members=self.members)

    async def start(self) -> None:
        """Find a worker, and start the heartbeat."""
        await self.members.first()
        self.spawn(self._heartbeat.run())

    async def kill(self) -> None:
        """End the node at once. Its leases remain in the store."""
        self.remote.failure = GONE
        for worker in self.fleet.workers:
            link = worker.backend._link
            if link is not None:
                link.channel.fail(GONE)
        await self.members.close()
        await self._end()

    async def drain(self) -> None:
        """End the node in order, once its requests have ended."""
        self.lifecycle.move_to(NodeState.DRAINING)
        await self.lifecycle.in_flight.drained()
        await self.members.close()
        await self._end()


@contextmanager
def virtual_links(nodes: Mapping[str, WorkerNode]) -> Iterator[None]:
    """Let all peers connect over wires, with the clock of the event loop."""
    clock = SimpleNamespace(monotonic=loop_time_s)
    with (
        patch.object(peer_backend, "linked", partial(_linked, nodes)),
        patch.object(peer_session, "time", clock),
        patch.object(peer_session, "REPORT_S", REPORT_S),
    ):
        yield


@asynccontextmanager
async def _linked(
    nodes: Mapping[str, WorkerNode], _http: object, url: str, _secret: object
) -> AsyncGenerator[peer_link.Link, None]:
    """Connect to a node, as `peer_link.linked` does over HTTP."""
    link = peer_link.Link()
    try:
        async with peer_link._time_limit(CONNECT_S, "it did not respond in time"):
            node = _node_at(nodes, url)
            await node.reachable.wait()
            link.channel.take_over(node.connect().ends[0])
            link.channel.send(ALIVE)
            link.ready = await peer_link._ready(link)
        yield link
    finally:
        link.channel.close()


def _node_at(nodes: Mapping[str, WorkerNode], url: str) -> WorkerNode:
    node = nodes.get(url.partition(WORKER_PATH)[0])
    if node is None:
        raise BackendFailed("the connection was refused")
    return node
