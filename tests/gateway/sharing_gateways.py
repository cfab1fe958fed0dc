"""A state machine of gateways that share what they have learned, in virtual time."""

from __future__ import annotations

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import rule

from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.sharing import Sharing
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.policies.admission.appointments import Appointments
from draftgate.policies.speculation.acceptance_history import AcceptanceHistory
from tests.gateway.flaky_store import FlakyStore, guarded
from tests.gateway.troubled_gateways import BACK_S, TroubledGateways

GATEWAYS = 2

gateways = st.integers(0, GATEWAYS - 1)


class SharingGateway:
    """A gateway with its own connection to the store that it shares."""

    def __init__(self, inner: MemoryStore) -> None:
        self.remote = FlakyStore()
        self.remote.inner = inner
        self.store = guarded(self.remote)
        self.history = AcceptanceHistory()
        self.appointments = Appointments()
        self.sharing = Sharing(self.store, self.history, self.appointments, loop_time_s)


class SharingGateways(TroubledGateways):
    """Gateways that exchange what they know with each heartbeat.

    Attributes:
        make_gateway: the class of the gateways.
    """

    make_gateway: type[SharingGateway]

    async def begin(self) -> None:
        self.gateways = [self.make_gateway(self.inner) for _ in range(GATEWAYS)]
        await self.beat()

    async def beat(self) -> None:
        for gateway in self.gateways:
            await gateway.sharing.exchange()

    @rule(seconds=st.sampled_from([0.01, 0.25, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass, with a heartbeat of every gateway each second."""
        self.runner.run(self.pass_seconds(seconds))

    @rule(
        gateway=gateways,
        failure=st.none() | st.just("refused"),
        delay_s=st.sampled_from([0.0, 0.0, 0.03, 0.5]),
    )
    def change_connection(self, gateway: int, failure: str | None, delay_s: float) -> None:
        """Change the connection. The answers of slow calls are lost, but the calls have effect."""
        remote = self.gateways[gateway].remote
        remote.failure, remote.delay_s = failure, delay_s

    async def replace_gateway(self, index: int) -> None:
        """Replace a gateway by a new process, which knows nothing."""
        self.gateways[index].remote.failure = "dead"
        await self.gateways[index].store.close()
        self.gateways[index] = self.make_gateway(self.inner)

    async def flush_store(self) -> None:
        await asyncio.sleep(0.01)  # a store that starts at the same time would be the same
        await super().flush_store()

    async def recover_all(self) -> None:
        """Repair all connections, and let all gateways exchange what they know."""
        await self.end_trouble(round(BACK_S) + 2)
