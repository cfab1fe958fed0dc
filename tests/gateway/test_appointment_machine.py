"""A state machine of gateways that share their appointments, in virtual time.

Connections fail and are slow, gateways are killed, and the store loses its memory. A gateway gives
no appointment in the room of a booking that it could know, and honours the appointments of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from draftgate.backends.sim.virtual_time import VirtualTimeLoop
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.sharing import Sharing
from draftgate.gateway.state.memory import MemoryStore
from draftgate.policies.admission.appointments import Appointments, Booking
from draftgate.policies.speculation.acceptance_history import AcceptanceHistory
from tests.examples import examples
from tests.gateway.flaky_store import FlakyStore, guarded
from tests.gateway.test_exchange_machine import BACK_S, GATEWAYS, gateways

WORK_S = 0.5


class Gateway:
    """A gateway with its own connection to the store that it shares.

    Attributes:
        known: fingerprints of the bookings that the gateway must know.
    """

    def __init__(self, inner: MemoryStore) -> None:
        self.remote = FlakyStore()
        self.remote.inner = inner
        self.store = guarded(self.remote)
        self.appointments = Appointments()
        history = AcceptanceHistory()
        self.sharing = Sharing(self.store, history, self.appointments, loop_time_s)
        self.known = set[int]()

    @property
    def is_connected(self) -> bool:
        """Whether an exchange succeeds."""
        healthy = self.remote.failure is None and not self.remote.delay_s
        return healthy and self.store.outage is None


@dataclass
class Promise:
    """An appointment of a client that has not returned."""

    gateway: int
    due_s: float
    until_s: float


class SharedAppointments(RuleBasedStateMachine):
    """Gateways of an overloaded pool, whose clients return on time to any gateway."""

    def __init__(self) -> None:
        super().__init__()
        self.promises: dict[int, Promise] = {}  # by fingerprint
        self.in_store = set[int]()  # fingerprints of the bookings that the store must have
        self.fingerprints = 0
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.runner.run(self._begin())

    async def _begin(self) -> None:
        self.inner = MemoryStore(asyncio.get_running_loop().time)
        self.gateways = [Gateway(self.inner) for _ in range(GATEWAYS)]
        await self._beat()

    async def _beat(self) -> None:
        for gateway in self.gateways:
            await gateway.sharing.exchange()
            if gateway.is_connected:
                self.in_store |= gateway.known
                gateway.known |= self.in_store

    def teardown(self) -> None:
        async def end() -> None:
            for gateway in self.gateways:
                await gateway.store.close()

        self.runner.run(end())
        self.runner.close()

    def run_now(self, call: Callable[[float], None]) -> None:
        """Call a function with the time of the loop."""

        async def called() -> None:
            call(loop_time_s())

        self.runner.run(called())

    # --- clients ----------------------------------------------------------------------------------

    @rule(gateway=gateways, count=st.integers(1, 3))
    def refuse(self, gateway: int, count: int) -> None:
        """Give appointments after all booked work, and check that its room is free."""
        for _ in range(count):
            self.run_now(lambda now_s: self._refuse(gateway, now_s))

    def _refuse(self, index: int, now_s: float) -> None:
        gateway = self.gateways[index]
        appointments = gateway.appointments
        appointments.expire(now_s)
        booked_s = sum(appointments.ahead_s(0, "t", 1.0, WORK_S))
        known = gateway.known & self.promises.keys()
        least_s = len([one for one in known if self.promises[one].until_s >= now_s]) * WORK_S
        assert booked_s >= least_s * appointments.kept_share - 1e-6
        self.fingerprints += 1
        due_s = now_s + booked_s
        booking = Booking(self.fingerprints, 0, "t", WORK_S, due_s, now_s)
        appointments.book(booking)
        gateway.known.add(self.fingerprints)
        self.promises[self.fingerprints] = Promise(index, due_s, booking.until_s)

    @precondition(lambda self: self.promises)
    @rule(data=st.data(), gateway=gateways)
    def return_on_time(self, data: st.DataObject, gateway: int) -> None:
        """Let a client return, which has a booking wherever its booking must be known."""
        fingerprint = data.draw(st.sampled_from(sorted(self.promises)))
        self.run_now(lambda now_s: self._return(fingerprint, self.gateways[gateway], now_s))

    def _return(self, fingerprint: int, gateway: Gateway, now_s: float) -> None:
        promise = self.promises[fingerprint]
        found = gateway.appointments.find(fingerprint, now_s, 1)
        if fingerprint in gateway.known and promise.until_s > now_s:
            assert found is not None
            assert found.due_s == pytest.approx(promise.due_s, abs=0.6)  # of a slow connection
        if found is not None:
            gateway.appointments.close(found)
            del self.promises[fingerprint]
            for one in self.gateways:
                one.known.discard(fingerprint)
            self.in_store.discard(fingerprint)

    # --- time and trouble -------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 0.25, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass, with a heartbeat of every gateway each second."""

        async def passed() -> None:
            await asyncio.sleep(seconds % 1.0)
            for _ in range(int(seconds)):
                await asyncio.sleep(1.0)
                await self._beat()

        self.runner.run(passed())

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

        async def replaced() -> None:
            self.gateways[gateway].remote.failure = "dead"
            await self.gateways[gateway].store.close()
            self.gateways[gateway] = Gateway(self.inner)

        self.runner.run(replaced())

    @rule()
    def flush(self) -> None:
        """Delete the memory of the store."""

        async def flushed() -> None:
            await asyncio.sleep(0.01)  # a store that starts at the same time would be the same
            self.inner = MemoryStore(asyncio.get_running_loop().time)
            for gateway in self.gateways:
                gateway.remote.inner = self.inner

        self.in_store.clear()
        self.runner.run(flushed())

    @rule()
    def recover(self) -> None:
        """After a recovery, all gateways know the same bookings, and no booking is lost."""

        async def recovered() -> None:
            for gateway in self.gateways:
                gateway.remote.failure, gateway.remote.delay_s = None, 0.0
            for _ in range(round(BACK_S) + 2):
                await asyncio.sleep(1.0)
                await self._beat()
            for gateway in self.gateways:
                gateway.appointments.expire(loop_time_s())

        self.runner.run(recovered())
        first, *others = ({one.name for one in g.appointments._open()} for g in self.gateways)
        assert all(other == first for other in others)
        found = {one.fingerprint for one in self.gateways[0].appointments._open()}
        self.run_now(lambda now_s: self._check_known(found, now_s))

    def _check_known(self, found: set[int], now_s: float) -> None:
        """Check that the gateways know what they must know, and no client that has returned."""
        must = {one for one in self.gateways[0].known if self.promises[one].until_s > now_s + 0.6}
        assert must <= found


def test_shared_appointments() -> None:
    """Gateways give no appointment in the room of a booking that they could know, and honour it."""
    run_state_machine_as_test(
        SharedAppointments, settings=settings(max_examples=examples(40), stateful_step_count=30)
    )
