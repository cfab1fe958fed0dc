"""A state machine of gateways that share their appointments, in virtual time.

Connections fail and are slow, gateways are killed, and the store loses its memory. A gateway gives
no appointment in the room of a booking that it could know, and honours the appointments of others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)

from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.policies.admission.appointments import Booking
from tests.examples import examples
from tests.gateway.sharing_gateways import SharingGateway, SharingGateways, gateways
from tests.gateway.troubled_gateways import is_connected

WORK_S = 0.5


class Gateway(SharingGateway):
    """A gateway whose knowledge of bookings is known.

    Attributes:
        known: fingerprints of the bookings that the gateway must know.
    """

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.known = set[int]()


@dataclass
class Promise:
    """An appointment of a client that has not returned."""

    gateway: int
    due_s: float
    until_s: float


class SharedAppointments(SharingGateways):
    """Gateways of an overloaded pool, whose clients return on time to any gateway."""

    make_gateway = Gateway
    gateways: list[Gateway]

    def __init__(self) -> None:
        self.promises: dict[int, Promise] = {}  # by fingerprint
        self.in_store = set[int]()  # fingerprints of the bookings that the store must have
        self.fingerprints = 0
        super().__init__()

    async def beat(self) -> None:
        for gateway in self.gateways:
            await gateway.sharing.exchange()
            if is_connected(gateway):
                self.in_store |= gateway.known
                gateway.known |= self.in_store

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

    # --- trouble ----------------------------------------------------------------------------------

    @rule(gateway=gateways)
    def kill(self, gateway: int) -> None:
        """Replace a gateway by a new process, which knows nothing."""
        self.runner.run(self.replace_gateway(gateway))

    @rule()
    def flush(self) -> None:
        """Delete the memory of the store."""
        self.in_store.clear()
        self.runner.run(self.flush_store())

    @rule()
    def recover(self) -> None:
        """After a recovery, all gateways know the same bookings, and no booking is lost."""

        async def recovered() -> None:
            await self.recover_all()
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
