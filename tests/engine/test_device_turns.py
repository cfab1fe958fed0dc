"""Threads of engines that share a device: order, failures and stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue

import pytest

from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.core.text_batcher import TextBatcher, TextLimits
from draftgate.backends.engine.device_turns import DeviceTurns
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.loop import EngineLoop
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.kv_transfer.exchange import KvExchange, NoMemory
from draftgate.backends.types import Task
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.turns import StepUrgency
from draftgate.policies.types import BATCH_PRIORITY, ServiceLevel
from tests.core.fakes import FakeExecutor, request
from tests.core.pipeline_harness import LetterTokenizer

PATIENCE_S = 60.0
LIMITS = TextLimits(max_text_tokens=40, max_step_tokens=40, batch_step_tokens=1, max_sequences=64)
"""Each text of a batch has a step of its own."""


class WatchedTurns(DeviceTurns):
    """Turns that report the classes of the waiting engines after each change."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: SimpleQueue[list[int]] = SimpleQueue()

    def _wait(self, engine, urgency) -> None:
        super()._wait(engine, urgency)
        self.waits.put(sorted(each.priority for each in self._waiting.values()))


class Device:
    """A device whose steps end at the command of the test."""

    def __init__(self) -> None:
        self.turns = WatchedTurns()
        self._begun: SimpleQueue[str] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._busy = threading.Lock()

    def begin(self) -> str:
        """Return the first request of the next step, which then runs until `end`."""
        return self._begun.get(timeout=PATIENCE_S)

    def end(self, error: BaseException | None = None) -> None:
        """End a step, or let it fail."""
        self._ends.put(error)

    def run(self, plan: StepPlan) -> None:
        assert self._busy.acquire(blocking=False), "two steps run at the same time"
        try:
            self._begun.put(plan.work[0].sequence.request.request_id)
            error = self._ends.get(timeout=PATIENCE_S)
            if error is not None:
                raise error
        finally:
            self._busy.release()

    def until_waiting(self, *priorities: int) -> None:
        """Wait until engines with these classes wait for their turn."""
        while self.turns.waits.get(timeout=PATIENCE_S) != sorted(priorities):
            pass


class Executor(FakeExecutor):
    """An executor on such a device."""

    launcher = None

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def execute(self, plan: StepPlan) -> StepResult:
        self._device.run(plan)
        return super().execute(plan)


class Engine:
    """The loop of an engine of texts. Implements `loop.LoopEvents`."""

    def __init__(self, device: Device) -> None:
        self.is_ready = threading.Event()
        self.failures: SimpleQueue[BaseException] = SimpleQueue()
        worker = TextBatcher(LIMITS, LetterTokenizer(), StepCost((64,), (0.01,)))
        exchange = KvExchange(KvBlocks(1, 16), NoMemory())
        served = ServedModel(None, worker.admission)
        loaded = LoadedEngine(worker, Executor(device), exchange, served, {}, turns=device.turns)
        self.loop = EngineLoop(lambda _progress: loaded, self)

    def submit(self, name: str, priority: int = 0) -> None:
        """Submit a text."""
        text = replace(request(1, task=Task.EMBED), request_id=name)
        self.loop.submit(replace(text, service=ServiceLevel(priority=priority)))

    def loading(self, share: float) -> None:
        pass

    def ready(self, served: ServedModel) -> None:
        self.is_ready.set()

    def stepped(self, batch, load) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        self.failures.put(error)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def start(device: Device) -> Iterator[Callable[[], Engine]]:
    """Start engines on the device, and stop them after the test."""
    engines: list[Engine] = []

    def started() -> Engine:
        engines.append(Engine(device))
        engines[-1].loop.start()
        assert engines[-1].is_ready.wait(PATIENCE_S)
        return engines[-1]

    yield started
    for engine in engines:
        engine.loop.stop()
    for engine in engines:
        device.end()  # the step in progress, if any
        engine.loop.join(PATIENCE_S)
        assert not engine.loop.is_alive()
    assert device.turns.holder is None


def test_query_waits_only_for_the_step_in_progress(device: Device, start) -> None:
    """A query that arrives during a step of another engine's documents is next."""
    documents, queries = start(), start()
    for name in ("d1", "d2", "d3"):
        documents.submit(name, BATCH_PRIORITY)
    assert device.begin() == "d1"
    queries.submit("q1")
    device.until_waiting(0)
    for following in ("q1", "d2", "d3"):
        device.end()
        assert device.begin() == following


def test_query_to_the_engine_that_runs_a_step_counts_at_its_end(device: Device, start) -> None:
    """The choice after a step knows the texts that arrived during the step."""
    first, second = start(), start()
    first.submit("a1")
    assert device.begin() == "a1"
    second.submit("b1")
    device.until_waiting(0)
    first.submit("a2", -1)
    for following in ("a2", "b1"):
        device.end()
        assert device.begin() == following


def test_query_to_an_engine_that_waits_counts_immediately(device: Device, start) -> None:
    """An engine that waits with documents becomes the most urgent one when a query arrives."""
    first, second, third = start(), start(), start()
    first.submit("a1")
    assert device.begin() == "a1"
    second.submit("b1", BATCH_PRIORITY)
    device.until_waiting(BATCH_PRIORITY)
    third.submit("c1")
    device.until_waiting(0, BATCH_PRIORITY)
    second.submit("b2", -1)
    device.until_waiting(-1, 0)
    for following in ("b2", "c1", "b1"):
        device.end()
        assert device.begin() == following


def test_engine_that_fails_leaves_the_device_to_others(device: Device, start) -> None:
    """The error of a step ends its engine, and the waiting engine gets the turn."""
    failing, other = start(), start()
    failing.submit("a1")
    assert device.begin() == "a1"
    other.submit("b1")
    device.until_waiting(0)
    device.end(RuntimeError("the device is on fire"))
    assert device.begin() == "b1"
    assert "on fire" in str(failing.failures.get(timeout=PATIENCE_S))


def test_engine_that_waits_stops_immediately(device: Device, start) -> None:
    """A stopped engine does not wait for the step of another engine, and gets no turn."""
    first, second, third = start(), start(), start()
    first.submit("a1")
    assert device.begin() == "a1"
    second.submit("b1")
    device.until_waiting(0)
    third.submit("c1", BATCH_PRIORITY)
    device.until_waiting(0, BATCH_PRIORITY)
    second.loop.stop()
    second.loop.join(PATIENCE_S)
    assert not second.loop.is_alive()
    device.end()
    assert device.begin() == "c1"


def test_cancelled_text_gives_its_turn_to_others(device: Device, start) -> None:
    """An engine whose last text was cancelled while it waited takes no turn."""
    first, second, third = start(), start(), start()
    first.submit("a1")
    assert device.begin() == "a1"
    second.submit("b1")
    device.until_waiting(0)
    third.submit("c1", BATCH_PRIORITY)
    device.until_waiting(0, BATCH_PRIORITY)
    second.loop.cancel("b1")
    device.until_waiting(BATCH_PRIORITY)
    device.end()
    assert device.begin() == "c1"


def test_hanging_step_of_a_stopped_engine_blocks_no_other(device: Device, start) -> None:
    """A stopped engine gives its turn back immediately, even if its step never ends."""
    hanging = start()
    hanging.submit("a1")
    assert device.begin() == "a1"
    turns = device.turns.join(lambda: None, lambda: None)
    assert not turns.take()
    hanging.loop.stop()
    assert turns.take()
    turns.leave()


def test_engine_that_is_alone_states_no_urgency() -> None:
    """Without other engines, neither the urgency nor the clock is read."""

    def unread() -> float:
        raise AssertionError

    turns = DeviceTurns(unread).join(unread, unread)
    for _ in range(3):
        assert turns.take()
        assert turns.end_step(launched=True)
        assert turns.end_step()
    turns.give_back()
    assert not turns.held


def test_engine_beside_an_idle_one_keeps_its_turn() -> None:
    """An engine that nobody waits for is not interrupted, not even when it becomes idle."""
    device = DeviceTurns()
    engine = device.join(lambda: None, lambda: None)
    device.join(lambda: None, lambda: None)
    assert engine.take()
    assert engine.end_step()
    engine.give_back()
    assert device.holder is None


@pytest.mark.parametrize("joined", [False, True])
def test_engine_owes_nothing_for_steps_that_nobody_waited_for(joined: bool) -> None:
    """An engine that ran for long while the other one was idle, or had not joined, shares the
    device equally afterwards."""
    now_s = [0.0]
    device = DeviceTurns(lambda: now_s[0])
    first = device.join(StepUrgency, lambda: None)
    second = device.join(StepUrgency, lambda: None) if joined else None
    assert first.take()
    for _ in range(1000):
        now_s[0] += 0.1
        assert first.end_step()
    second = second or device.join(StepUrgency, lambda: None)
    assert not second.take()
    served = {first: 0, second: 0}
    for _ in range(100):
        now_s[0] += 0.1
        holder = first if first.held else second
        served[holder] += 1
        holder.end_step()
    assert served == {first: 50, second: 50}
