"""Which adapters are in memory, and which requests wait for theirs."""

from __future__ import annotations

from random import Random

import pytest

from draftgate.backends.core.adapter_slots import AdapterSlots
from draftgate.backends.types import GenerationRequest
from draftgate.policies.values import replace
from tests.core.fakes import request


class Worker:
    """Runs submitted requests until the test ends them."""

    def __init__(self, num_slots: int) -> None:
        self.open: dict[str, tuple[str, int]] = {}
        self.slots = AdapterSlots(num_slots, self.open.__contains__)
        self.loading: list[str] = []

    def add(self, request_id: str, adapter: str) -> None:
        added = replace(request([1]), request_id=request_id, adapter=adapter)
        self.slots.add(added, 0.0)

    def admit(self) -> list[str]:
        """Admit requests, and return the adapters that begin to load."""
        begun = [adapter for adapter, _ in self.slots.admit(self._submit)]
        self.loading += begun
        return begun

    def finish_loading(self) -> None:
        for adapter in self.loading:
            self.slots.loaded(adapter)
        self.loading = []
        self.admit()

    def _submit(self, admitted: GenerationRequest, arrived_s: float, slot: int) -> None:
        self.open[admitted.request_id] = admitted.adapter, slot


def test_requests_wait_until_their_adapter_is_loaded() -> None:
    """The first request loads an adapter, and all requests for it then use one slot."""
    worker = Worker(2)
    worker.add("a", "code")
    worker.add("b", "code")
    assert worker.admit() == ["code"]
    assert worker.admit() == []
    assert not worker.open
    worker.finish_loading()
    assert worker.open == {"a": ("code", 1), "b": ("code", 1)}


def test_requests_for_adapters_in_memory_pass_those_that_load() -> None:
    """Loading delays only the requests of the loading adapter."""
    worker = Worker(2)
    worker.add("a", "code")
    worker.admit()
    worker.finish_loading()
    worker.add("b", "law")
    worker.add("c", "code")
    assert worker.admit() == ["law"]
    assert set(worker.open) == {"a", "c"}


def test_least_recently_requested_idle_adapter_is_evicted() -> None:
    """An adapter with an open request stays, even if others were requested later."""
    worker = Worker(3)
    for request_id, adapter in (("a", "code"), ("b", "law"), ("c", "math"), ("d", "law")):
        worker.add(request_id, adapter)
        worker.admit()
        worker.finish_loading()
    for request_id in ("b", "c", "d"):
        del worker.open[request_id]
    worker.add("e", "poems")
    assert worker.admit() == ["poems"]
    assert tuple(worker.slots._slots) == ("code", "law")


def test_request_that_needs_a_slot_is_not_passed_forever() -> None:
    """While all slots have open requests, later requests for their adapters wait after it."""
    worker = Worker(1)
    worker.add("a", "code")
    worker.admit()
    worker.finish_loading()
    worker.add("b", "law")
    worker.add("c", "code")
    assert worker.admit() == []
    assert set(worker.open) == {"a"}
    del worker.open["a"]
    assert worker.admit() == ["law"]
    worker.finish_loading()
    assert set(worker.open) == {"b"}
    del worker.open["b"]
    assert worker.admit() == ["code"]


def test_failed_load_ends_only_its_requests() -> None:
    """The slot is free again, and cancelled requests are not reported."""
    worker = Worker(1)
    for request_id, adapter in (("a", "code"), ("b", "law"), ("c", "code")):
        worker.add(request_id, adapter)
    assert worker.admit() == ["code"]
    worker.slots.cancel("c")
    assert [one.request_id for one in worker.slots.failed("code")] == ["a"]
    assert worker.admit() == ["law"]


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_keep_the_slots_apart(seed: int) -> None:
    """Open requests of different adapters never share a slot, and every request runs in the end."""
    rng, worker, added, ended = Random(seed), Worker(3), 0, set[str]()
    for _ in range(300):
        if rng.random() < 0.5:
            worker.add(str(added), rng.choice("abcdef"))
            added += 1
        if worker.open and rng.random() < 0.5:
            request_id = rng.choice(sorted(worker.open))
            del worker.open[request_id]
            ended.add(request_id)
        worker.admit()
        if rng.random() < 0.3:
            worker.finish_loading()
        pairs = set(worker.open.values())
        assert len({slot for _, slot in pairs}) == len({adapter for adapter, _ in pairs})
        assert len(pairs) == len({slot for _, slot in pairs}) <= 3
    while worker.open or worker.slots.waiting_sequences:
        ended |= set(worker.open)
        worker.open.clear()
        worker.admit()
        worker.finish_loading()
    assert ended == {str(number) for number in range(added)}
