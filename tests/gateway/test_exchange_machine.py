"""A state machine of gateways that share their acceptance history, in virtual time.

Connections fail and are slow, gateways are killed, and the store loses its memory. The total of the
store contains every choice once, within the documented bounds.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from draftgate.policies.speculation.acceptance_history import (
    DraftCounts,
    Key,
    Tally,
)
from tests.examples import examples
from tests.gateway.exchange_contract import told
from tests.gateway.sharing_gateways import SharingGateway, SharingGateways, gateways

KEY: Key = (None, "m", True)
"""The sum over all tenants, which contains every choice."""


class Gateway(SharingGateway):
    """A gateway whose share of the history is known."""

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


class SharedHistory(SharingGateways):
    """Gateways that learn from choices of two tenants."""

    make_gateway = Gateway
    gateways: list[Gateway]

    def __init__(self) -> None:
        super().__init__()
        self.learned = 0
        self.lost = 0  # choices that the store may not have
        self.repeated = 0  # choices that the store may have twice
        self.flushed = self.killed = False

    @rule(gateway=gateways, tenant=st.sampled_from("ab"), count=st.integers(1, 3))
    def learn(self, gateway: int, tenant: str, count: int) -> None:
        """Let choices end, with 30 accepted and 5 rejected tokens each."""
        histogram = (0, 0, 5, 0, 5)
        for _ in range(count):
            history = self.gateways[gateway].history
            history.add_choice(tenant, "m", greedy=True, drafted=40, histogram=histogram)
        self.learned += count

    @rule(gateway=gateways)
    def beat_once(self, gateway: int) -> None:
        """Let one gateway have its heartbeat before the others."""
        self.runner.run(self.gateways[gateway].sharing.exchange())

    @rule(gateway=gateways)
    def kill(self, gateway: int) -> None:
        """Replace a gateway by a new process, which knows nothing."""
        self.killed = True
        self.lost += self.gateways[gateway].unconfirmed
        self.runner.run(self.replace_gateway(gateway))

    @rule()
    def flush(self) -> None:
        """Delete the memory of the store."""
        self.flushed = True
        self.repeated += sum(gateway.in_flight for gateway in self.gateways)

        async def flushed() -> None:
            total = (await self.stored_tally()).choices
            known = max(gateway.stored for gateway in self.gateways)
            self.lost += max(0, total - known)  # the gateways restore what they know
            await self.flush_store()

        self.runner.run(flushed())

    async def stored_tally(self) -> Tally:
        """Return the sum that the store has."""
        return dict((await told(self.inner, "test", 1)).history).get(KEY, Tally())

    @rule()
    def recover(self) -> None:
        """After a recovery, all gateways have the counts of the store, which has every choice."""
        self.runner.run(self.recover_all())
        found = self.runner.run(self.stored_tally())
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
