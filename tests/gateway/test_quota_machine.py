"""A state machine of gateways that share quotas through a store that fails, in virtual time.

Gateways are killed and restarted, clients disconnect, and the store is slow, unreachable or
flushed. The granted requests never exceed the documented bound, and the ledger balances. A store
that is slow, but answers within the deadline of quotas, adds nothing to the bound.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from draftgate.gateway.dispatch.leases import LEASE_S
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.state.commands import ReadTotals
from draftgate.gateway.state.guarded.calls import MOST_CALLS, QUOTA_DEADLINE_S
from draftgate.policies.quotas import Quota
from tests.examples import examples
from tests.gateway.test_guarded_quotas import Gateway
from tests.gateway.troubled_gateways import BACK_S, TroubledGateways

GATEWAYS = 3
RATE, BURST, TOKENS_BURST = 60, 12, 300
MOST_DELAY_S = QUOTA_DEADLINE_S / 8
"""The longest delay of a call with which the largest burst is served within the deadline."""

ACCOUNT = quota_account("t", "")
QUOTA = Quota(RATE, RATE * 10, BURST, TOKENS_BURST)

gateways = st.integers(0, GATEWAYS - 1)


@dataclass
class Granted:
    """A granted request.

    Attributes:
        tokens: the tokens that it may use, or has used.
        requests: 1, or 0 for a released request.
    """

    at_s: float
    tokens: int
    gateway: int
    request_id: str
    requests: int = 1


@dataclass
class Trouble:
    """A time in which a gateway may have decided alone.

    Attributes:
        largest: tokens of the largest request that the gateway granted in this time.
    """

    gateway: int
    begin_s: float
    end_s: float | None = None
    largest: int = 0


class SharedQuotas(TroubledGateways):
    """Gateways that grant requests of one tenant."""

    gateways: list[Gateway]

    def __init__(self) -> None:
        self.lives = 0
        self.granted: list[Granted] = []
        self.open: list[Granted] = []
        self.troubles: list[Trouble] = []
        self.flushed_s: list[float] = []
        self.killed_s = -math.inf
        super().__init__()

    async def begin(self) -> None:
        self.gateways = [self._gateway(f"g{index}-") for index in range(GATEWAYS)]
        await self.beat()

    def _gateway(self, name: str) -> Gateway:
        return Gateway(name, self.inner, GATEWAYS, QUOTA)

    @property
    def now_s(self) -> float:
        return self.runner.get_loop().time()

    # --- requests ---------------------------------------------------------------------------------

    @rule(tokens=st.sampled_from([0, 1, 20, 45]))
    def flood(self, tokens: int) -> None:
        for gateway in range(GATEWAYS):
            self.reserve(gateway, tokens, 14)

    @rule(
        gateway=gateways,
        tokens=st.sampled_from([0, 1, 20, 90, 150, 300]),
        count=st.sampled_from([1, 3, 14]),
    )
    def reserve(self, gateway: int, tokens: int, count: int) -> None:
        for _ in range(count):
            begin_s = self.now_s
            self._note(begin_s, tokens, gateway, self.runner.run(self._reserve(gateway, tokens)))
        self._check_bound()

    @rule(tokens=st.sampled_from([0, 5]), count=st.sampled_from([2, 2 * MOST_CALLS]))
    def burst(self, tokens: int, count: int) -> None:
        """Send requests to all gateways at the same time."""
        gateways = [index for index in range(GATEWAYS) for _ in range(count)]
        begin_s = self.now_s

        async def found() -> list[str | None]:
            calls = (self._reserve(gateway, tokens) for gateway in gateways)
            return await asyncio.gather(*calls)

        for gateway, name in zip(gateways, self.runner.run(found()), strict=True):
            self._note(begin_s, tokens, gateway, name)
        self._check_bound()

    async def _reserve(self, gateway: int, tokens: int) -> str | None:
        return await self.gateways[gateway].reserve(tokens)

    def _note(self, begin_s: float, tokens: int, gateway: int, name: str | None) -> None:
        """Note a granted request. `name` is None for a refused one."""
        if name is None:
            return
        made = Granted(begin_s, tokens, gateway, name)
        self.granted.append(made)
        self.open.append(made)
        for trouble in self.troubles:
            if trouble.gateway == gateway and trouble.end_s is None:
                trouble.largest = max(trouble.largest, tokens)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), used=st.integers(0, 100), released=st.booleans())
    def end(self, data: st.DataObject, used: int, *, released: bool) -> None:
        made = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        made.tokens = min(made.tokens, used)
        quotas = self.gateways[made.gateway].quotas

        async def ended() -> None:
            if released:
                made.tokens = made.requests = 0
                quotas.release(made.request_id)
            else:
                quotas.settle(made.request_id, made.tokens)

        self.runner.run(ended())

    @rule(gateway=gateways, ticks=st.integers(0, 6))
    def disconnect(self, gateway: int, ticks: int) -> None:
        """Cancel a reservation while it waits, and release it if it was faster."""

        async def cancelled() -> None:
            call = asyncio.create_task(self.gateways[gateway].reserve(10))
            for _ in range(ticks):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call})
            if not call.cancelled() and call.result() is not None:
                self.gateways[gateway].quotas.release(call.result())

        self.runner.run(cancelled())

    # --- time and trouble -------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.25, 1.0, 4.0, 15.0]))
    def pass_time(self, seconds: float) -> None:
        self.runner.run(self.pass_seconds(seconds))

    async def beat(self) -> None:
        for gateway in self.gateways:
            await gateway.beat()
        for trouble in self.troubles:
            if trouble.end_s is None and self._decides_with_store(trouble.gateway):
                trouble.end_s = asyncio.get_running_loop().time()

    @rule(
        gateway=gateways,
        failure=st.none() | st.just("refused"),
        delay_s=st.sampled_from([0.0, 0.0, 0.03, MOST_DELAY_S, 2 * QUOTA_DEADLINE_S]),
    )
    def change_connection(self, gateway: int, failure: str | None, delay_s: float) -> None:
        remote = self.gateways[gateway].remote
        remote.failure, remote.delay_s = failure, delay_s
        known = any(one.gateway == gateway and one.end_s is None for one in self.troubles)
        if (failure or delay_s > MOST_DELAY_S) and not known:
            self.troubles.append(Trouble(gateway, self.now_s))

    def _decides_with_store(self, gateway: int) -> bool:
        """Return whether the store decides about the quotas of a gateway."""
        remote, quotas = self.gateways[gateway].remote, self.gateways[gateway].store.quotas
        slow = remote.delay_s > MOST_DELAY_S
        return remote.failure is None and not slow and quotas.outage is None

    @rule(gateway=gateways)
    def kill(self, gateway: int) -> None:
        """Replace a gateway by a new process, which knows nothing."""
        self.killed_s = self.now_s
        self.open = [made for made in self.open if made.gateway != gateway]
        self.lives += 1
        for trouble in self.troubles:
            if trouble.gateway == gateway and trouble.end_s is None:
                trouble.end_s = self.now_s

        async def replaced() -> None:
            await self.gateways[gateway].end()
            self.gateways[gateway] = self._gateway(f"g{gateway}-{self.lives}-")
            await self.gateways[gateway].beat()

        self.runner.run(replaced())

    @rule()
    def flush(self) -> None:
        self.flushed_s.append(self.now_s)
        self.runner.run(self.flush_store())

    # --- guarantees -------------------------------------------------------------------------------

    @rule()
    def recover(self) -> None:
        """After a recovery, the store has exactly the reservations of the living gateways."""
        expiry_s = self.killed_s + LEASE_S  # of the reservations of a killed gateway
        self.runner.run(self.end_trouble(BACK_S + max(2.0, expiry_s - self.now_s)))
        assert all(gateway.store.quotas.outage is None for gateway in self.gateways)
        found = self.runner.run(self.inner.call(ReadTotals(ACCOUNT)))
        assert found.open == sum(made.tokens for made in self.open)
        for index, gateway in enumerate(self.gateways):
            own = self.runner.run(gateway.store.call(ReadTotals(ACCOUNT)))
            assert own.open == sum(made.tokens for made in self.open if made.gateway == index)
            assert not gateway.store.quotas._alone
            assert not gateway.store.quotas._pending
            assert not gateway.store.quotas._debts
        if self.killed_s < 0 and not self.troubles and not self.flushed_s:
            assert found.settled == sum(made.tokens for made in self.granted) - found.open

    @invariant()
    def check_balance(self) -> None:
        """Check that each ledger balances."""
        for store in (self.inner, *(one.store for one in self.gateways)):
            found = self.runner.run(store.call(ReadTotals(ACCOUNT)))
            assert found.reserved == found.settled + found.released + found.open
            assert min(found) >= 0

    def _check_bound(self) -> None:
        """Check the documented bound for every interval from a grant until now."""
        requests = tokens = 0
        for made in reversed(self.granted):
            requests += made.requests
            tokens += made.tokens
            most_requests, most_tokens = self._bound(made.at_s, self.now_s)
            assert requests <= most_requests + 1e-6
            assert tokens <= most_tokens + 1e-6

    def _bound(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """Return the requests and tokens that may be granted from one time to another."""
        seconds = end_s - begin_s
        flushes = sum(begin_s <= at_s <= end_s for at_s in self.flushed_s)
        requests = BURST * (1 + flushes) + RATE / 60 * seconds
        tokens = TOKENS_BURST * (1 + flushes) + RATE / 6 * seconds
        for trouble in self.troubles:
            lasted_s = min(end_s, trouble.end_s or end_s) - max(begin_s, trouble.begin_s)
            if lasted_s >= 0:
                requests += BURST // GATEWAYS + RATE // GATEWAYS / 60 * lasted_s
                tokens += max(TOKENS_BURST // GATEWAYS, trouble.largest)
                tokens += RATE * 10 // GATEWAYS / 60 * lasted_s
        return requests, tokens


def test_shared_quotas() -> None:
    """Gateways that share a quota grant at most the documented bound, and the ledger balances."""
    run_state_machine_as_test(
        SharedQuotas, settings=settings(max_examples=examples(60), stateful_step_count=30)
    )
