"""A state machine of gateways that share their acceptance history, in virtual time.

Connections fail and are slow, gateways are killed, and the store loses its memory. The total of the
store contains every choice once, within the documented bounds.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from draftgate.backends.sim.virtual_time import VirtualTimeLoop
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.sharing import Sharing
from draftgate.gateway.state.calls import PATIENCE
from draftgate.gateway.state.memory import MemoryStore
from draftgate.policies.admission.appointments import Appointments
from draftgate.policies.speculation.acceptance_history import (
    AcceptanceHistory,
    DraftCounts,
    Key,
    Tally,
)
from tests.examples import examples
from tests.gateway.exchange_contract import told
from tests.gateway.flaky_store import FlakyStore, guarded

GATEWAYS = 2
BACK_S = 2 * PATIENCE.longest_pause_s
KEY: Key = (None, "m", True)
"""The sum over all tenants, which contains every choice."""

gateways = st.integers(0, GATEWAYS - 1)


class Gateway:
    """A gateway with its own connection to the store that it shares."""

    def __init__(self, inner: MemoryStore) -> None:
        self.remote = FlakyStore()
        self.remote.inner = inner
        self.store = guarded(self.remote)
        self.history = AcceptanceHistory()
        self.sharing = Sharing(self.store, self.history, Appointments(), loop_time_s)
        self.learned = 0

    def counts(self, tenant: str) -> DraftCounts:
        """Return the counts of a tenant."""
        return self.history.counts(tenant, "m", greedy=True)[0]

    @property
    def stored(self) -> int:
        """The number of choices that the gateway knows to be in the store."""
        return dict(self.history.totals()).get(KEY, Tally()).choices

    @property
    def in_flight(self) -> int:
        """The number of choices that the store may have, without a confirmation."""
        entry = self.history._entries.get(KEY)
        return 0 if entry is None else entry.sent.choices

    @property
    def unconfirmed(self) -> int:
        """The number of choices that the store may not have."""
        entry = self.history._entries.get(KEY)
        return 0 if entry is None else entry.sent.choices + entry.new.choices


class SharedHistory(RuleBasedStateMachine):
    """Gateways that learn from choices of two tenants."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.runner.run(self._begin())
        self.learned = 0
        self.lost = 0  # choices that the store may not have
        self.repeated = 0  # choices that the store may have twice
        self.flushed = self.killed = False

    async def _begin(self) -> None:
        self.inner = MemoryStore(asyncio.get_running_loop().time)
        self.gateways = [Gateway(self.inner) for _ in range(GATEWAYS)]
        for gateway in self.gateways:
            await gateway.sharing.exchange()

    def teardown(self) -> None:
        async def end() -> None:
            for gateway in self.gateways:
                await gateway.store.close()

        self.runner.run(end())
        self.runner.close()

    @rule(gateway=gateways, tenant=st.sampled_from("ab"), count=st.integers(1, 3))
    def learn(self, gateway: int, tenant: str, count: int) -> None:
        """Let choices end, with 30 accepted and 5 rejected tokens each."""
        histogram = (0, 0, 5, 0, 5)
        for _ in range(count):
            history = self.gateways[gateway].history
            history.add_choice(tenant, "m", greedy=True, drafted=40, histogram=histogram)
        self.learned += count

    @rule(seconds=st.sampled_from([0.01, 0.25, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass, with a heartbeat of every gateway each second."""

        async def passed() -> None:
            await asyncio.sleep(seconds % 1.0)
            for _ in range(int(seconds)):
                await asyncio.sleep(1.0)
                for gateway in self.gateways:
                    await gateway.sharing.exchange()

        self.runner.run(passed())

    @rule(gateway=gateways)
    def beat(self, gateway: int) -> None:
        """Let one gateway have its heartbeat before the others."""
        self.runner.run(self.gateways[gateway].sharing.exchange())

    @rule(
        gateway=gateways,
        failure=st.none() | st.just("refused"),
        delay_s=st.sampled_from([0.0, 0.0, 0.03, 0.5]),
    )
    def change_connection(self, gateway: int, failure: str | None, delay_s: float) -> None:
        """Change the connection. The answers of slow calls are lost, but the calls have effect."""
        remote = self.gateways[gateway].remote
        remote.failure, remote.delay_s = failure, delay_s

    @rule(gateway=gateways)
    def kill(self, gateway: int) -> None:
        """Replace a gateway by a new process, which knows nothing."""
        self.killed = True
        self.lost += self.gateways[gateway].unconfirmed

        async def replaced() -> None:
            self.gateways[gateway].remote.failure = "dead"
            await self.gateways[gateway].store.close()
            self.gateways[gateway] = Gateway(self.inner)

        self.runner.run(replaced())

    @rule()
    def flush(self) -> None:
        """Delete the memory of the store."""
        self.flushed = True
        self.repeated += sum(gateway.in_flight for gateway in self.gateways)

        async def flushed() -> None:
            await asyncio.sleep(0.01)  # a store that starts at the same time would be the same
            total = dict((await told(self.inner, "test", 1)).history).get(KEY, Tally()).choices
            self.lost += total - max(gateway.stored for gateway in self.gateways)
            self.inner = MemoryStore(asyncio.get_running_loop().time)
            for gateway in self.gateways:
                gateway.remote.inner = self.inner

        self.runner.run(flushed())

    @rule()
    def recover(self) -> None:
        """After a recovery, all gateways have the counts of the store, which has every choice."""

        async def recovered() -> Tally:
            for gateway in self.gateways:
                gateway.remote.failure, gateway.remote.delay_s = None, 0.0
            for _ in range(round(BACK_S) + 2):
                await asyncio.sleep(1.0)
                for gateway in self.gateways:
                    await gateway.sharing.exchange()
            return dict((await told(self.inner, "test", 1)).history).get(KEY, Tally())

        found = self.runner.run(recovered())
        assert found.choices <= self.learned + self.repeated
        if not (self.flushed and self.killed):  # a killed gateway restores nothing
            assert found.choices >= self.learned - self.lost
        for gateway in self.gateways:
            assert gateway.unconfirmed == 0
            assert gateway.counts("a") == self.gateways[0].counts("a")
            assert gateway.counts("b") == self.gateways[0].counts("b")
            counts = gateway.history.counts("a", "m", greedy=True)[1]
            assert counts == DraftCounts(found.accepted, found.rejected)
            assert counts.accepted == pytest.approx(6 * counts.rejected)


def test_shared_history() -> None:
    """After failures, gateways have the same counts again, with every choice once."""
    run_state_machine_as_test(
        SharedHistory, settings=settings(max_examples=examples(100), stateful_step_count=30)
    )
