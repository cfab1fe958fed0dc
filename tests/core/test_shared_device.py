"""Workers that share a device: no two steps at the same time, and the same deltas as alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.device_turns import DeviceTurns
from draftgate.backends.types import GenerationRequest
from draftgate.policies.turns import StepUrgency
from draftgate.policies.types import ServiceLevel
from tests.core.fakes import request
from tests.core.pipeline_harness import FakeDevice, PipelineHarness
from tests.examples import examples

ROUNDS = 1000
"""Steps after which all workers must be idle."""


class OneDevice(FakeDevice):
    """A worker's view of a device that runs the steps of one worker at a time."""

    def __init__(self, views: list[OneDevice]) -> None:
        super().__init__()
        self._views = views
        views.append(self)

    def launch(self, plan: StepPlan, previous=None):
        assert not any(view.in_flight for view in self._views if view is not self)
        return super().launch(plan, previous)


class Workers:
    """Workers that share a device, driven in one thread."""

    def __init__(self, number: int, *, asynchronous: bool, num_blocks: int = 16) -> None:
        ticks = count()
        self.turns = DeviceTurns(lambda: 1e-3 * next(ticks))
        views: list[OneDevice] = []
        self.harnesses: list[PipelineHarness] = []
        self.engines = []
        for index in range(number):
            engine = self.turns.join(lambda index=index: self._urgency(index), lambda: None)
            self.engines.append(engine)
            harness = PipelineHarness(
                asynchronous=asynchronous,
                num_blocks=num_blocks,
                policy="fixed:2",
                device=OneDevice(views),
                turns=engine,
            )
            self.harnesses.append(harness)

    def _urgency(self, index: int) -> StepUrgency | None:
        return self.harnesses[index].worker.urgency(0.0)

    def run(self) -> None:
        """Step all workers until they are idle. A worker that gets the turn wakes up."""
        for _ in range(ROUNDS):
            stepped = [harness.step() for harness in self.harnesses]
            if not any(stepped) and self.turns.holder is None:
                break
        assert self.turns.holder is None
        assert not self.turns.awaited
        for harness in self.harnesses:
            harness.run()


REQUESTS = st.lists(
    st.builds(
        dict,
        prompt=st.integers(1, 14),
        max_tokens=st.integers(1, 14),
        drafts=st.sampled_from([0, 0, 2]),
        service=st.builds(ServiceLevel, st.none() | st.floats(0, 1), st.none() | st.floats(0, 1)),
    ),
    max_size=4,
)


def requests(parameters: list[dict]) -> list[GenerationRequest]:
    services = [each.pop("service") for each in parameters]
    made = [request(**each) for each in parameters]
    return [replace(r, service=service) for r, service in zip(made, services, strict=True)]


@settings(max_examples=examples(150))
@given(
    st.lists(REQUESTS, min_size=2, max_size=3),
    st.lists(st.integers(0, 2), max_size=60),
    st.booleans(),
    st.integers(0, 60),
)
def test_deltas_are_the_same_and_steps_do_not_overlap(parameters, order, asynchronous, leaves):
    """In any order of threads, each worker produces the deltas that it produces alone, and no two
    workers have a step on the device. A worker that leaves blocks no other."""
    batches = [requests([dict(each) for each in of_worker]) for of_worker in parameters]
    workers = Workers(len(batches), asynchronous=asynchronous)
    for harness, batch in zip(workers.harnesses, batches, strict=True):
        for each in batch:
            harness.submit(each)
    leaver = workers.turns.join(lambda: StepUrgency(-1), lambda: None)
    for step_number, index in enumerate(order):
        if step_number == leaves:
            leaver.take()  # it may get the turn, or wait for it
            leaver.leave()
        workers.harnesses[index % len(batches)].step()
    workers.run()
    leaver.leave()
    assert not leaver.take()
    for harness, batch in zip(workers.harnesses, batches, strict=True):
        alone = PipelineHarness(asynchronous=asynchronous, num_blocks=16, policy="fixed:2")
        for each in batch:
            alone.submit(each)
        alone.run()
        assert harness.deltas_by_choice() == alone.deltas_by_choice()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_more_urgent_worker_waits_only_for_launched_steps(asynchronous: bool) -> None:
    """The device runs no further step of a worker once a more urgent one waits, until that one has
    run. A worker that nobody waits for launches steps ahead."""
    workers = Workers(2, asynchronous=asynchronous)
    usual, urgent = workers.harnesses
    usual.submit(request(max_tokens=12, ignore_eos=True))
    for _ in range(4):
        usual.step()
    assert bool(usual.device.overlapped) == asynchronous
    query = replace(request(max_tokens=2, ignore_eos=True), service=ServiceLevel(priority=-1))
    urgent.submit(query)
    launched = usual.device.overlapped
    while not urgent.step():
        usual.step()
    assert usual.device.overlapped == launched
    assert usual.device.in_flight == 0
    while urgent.worker.open_requests:
        assert not usual.step()
        urgent.step()
    workers.run()


def test_interrupted_steps_teach_no_host_time() -> None:
    """The wait for other workers is no host time of drafting, but counts as time per token."""
    alone, shared = (
        PipelineHarness(asynchronous=False, num_blocks=16, policy="fixed:2") for _ in range(2)
    )
    learned = {}
    for name, harness in (("alone", alone), ("shared", shared)):
        clock_s = count(0.0, 0.5)
        observed = learned[name] = []
        saved_time = harness.scheduler._drafts.saved_time

        def end_step(*times, seen=observed, end=saved_time.end_step):
            seen.append(end(*times))
            return seen[-1]

        saved_time.end_step = end_step
        harness.pipeline._now_s = lambda clock_s=clock_s: next(clock_s)
        harness.submit(request(max_tokens=6, ignore_eos=True))
    shared.pipeline._turns = Interrupted()
    alone.run()
    shared.run()
    assert sum(work is not None for work in learned["alone"]) == 5
    assert all(work is None for work in learned["shared"])
    assert shared.worker.load().speed.tpot_s == alone.worker.load().speed.tpot_s > 0.1


class Interrupted:
    """Turns that end after each step, after which another worker runs a step."""

    awaited = True

    def take(self) -> bool:
        return True

    def end_step(self, *, launched: bool) -> bool:
        return False

    def give_back(self) -> None:
        pass
