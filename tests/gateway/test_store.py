"""What every state store must do. A store's tests subclass `StoreConformance`."""

from __future__ import annotations

import pytest

from gateway.state.memory import MemoryStore
from gateway.state.store import Store
from policies.types import WorkerLoad

IDLE = WorkerLoad(0, 0, 10, 10, 0.0, 0.5, ("ngram",))
BUSY = WorkerLoad(8, 3, 1, 10, 0.25, 0.7, ("ngram",))


class StoreConformance:
    """The contract of `Store`; time passes only when a test says so."""

    @pytest.fixture
    def store(self) -> Store:
        """A fresh store."""
        raise NotImplementedError

    def pass_time(self, seconds: float) -> None:
        """Let the store's clock go on."""
        raise NotImplementedError

    async def test_the_last_load_counts_and_ages(self, store: Store) -> None:
        """A worker is known by what it published last, and how long ago that was."""
        await store.publish("b", IDLE)
        await store.publish("a", IDLE)
        self.pass_time(2.0)
        await store.publish("b", BUSY)
        self.pass_time(1.0)
        found = await store.snapshot()
        assert [(view.worker_id, view.load) for view in found] == [("a", IDLE), ("b", BUSY)]
        assert [view.age_s for view in found] == pytest.approx([3.0, 1.0], abs=0.05)

    async def test_a_withdrawn_worker_is_gone(self, store: Store) -> None:
        """A worker that leaves is forgotten; leaving twice is no error."""
        await store.publish("a", IDLE)
        await store.withdraw("a")
        await store.withdraw("a")
        assert await store.snapshot() == []

    async def test_leases_add_up_until_released(self, store: Store) -> None:
        """Leased tokens are the sum of living leases; a release counts once."""
        await store.publish("a", IDLE)
        await store.reserve("a", "r1", 100, 60.0)
        await store.reserve("a", "r2", 30, 60.0)
        assert (await store.snapshot())[0].leased_tokens == 130
        await store.release("r1")
        await store.release("r1")
        assert (await store.snapshot())[0].leased_tokens == 30

    async def test_a_lease_of_the_same_request_replaces_the_first(self, store: Store) -> None:
        """A request holds one lease, also when it moves to another worker."""
        await store.publish("a", IDLE)
        await store.publish("b", IDLE)
        await store.reserve("a", "r", 100, 60.0)
        await store.reserve("b", "r", 50, 60.0)
        assert [view.leased_tokens for view in await store.snapshot()] == [0, 50]

    async def test_a_lease_expires_by_itself(self, store: Store) -> None:
        """What a dead gateway reserved comes back without anybody's help."""
        await store.publish("a", IDLE)
        await store.reserve("a", "r", 100, 5.0)
        self.pass_time(4.0)
        assert (await store.snapshot())[0].leased_tokens == 100
        self.pass_time(2.0)
        assert (await store.snapshot())[0].leased_tokens == 0

    async def test_renewing_prolongs_living_leases_only(self, store: Store) -> None:
        """A renewed lease lives on; one that has expired is not raised from the dead."""
        await store.publish("a", IDLE)
        await store.reserve("a", "living", 10, 5.0)
        await store.reserve("a", "dead", 100, 1.0)
        self.pass_time(3.0)
        await store.renew(["living", "dead", "unknown"], 5.0)
        self.pass_time(4.0)
        assert (await store.snapshot())[0].leased_tokens == 10


class TestMemoryStore(StoreConformance):
    """The store of a node that stands alone."""

    @pytest.fixture
    def store(self) -> Store:
        """A store whose clock is `pass_time`."""
        self.now_s = 100.0
        return MemoryStore(lambda: self.now_s)

    def pass_time(self, seconds: float) -> None:
        """Move the clock."""
        self.now_s += seconds
