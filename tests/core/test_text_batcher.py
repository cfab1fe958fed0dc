"""The plans of a worker whose texts take one step each: classes, bounds, completeness."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.core.text_batcher import TextBatcher, TextLimits
from draftgate.backends.errors import RequestRejected
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, Task
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import BATCH_PRIORITY, ServiceLevel
from tests.core.fakes import FakeExecutor, pooled_state, request
from tests.core.pipeline_harness import LetterTokenizer

LIMITS = TextLimits(max_text_tokens=40, max_step_tokens=48, batch_step_tokens=16, max_sequences=9)
QUERY, DOCUMENT = 0, BATCH_PRIORITY


def batcher() -> TextBatcher:
    return TextBatcher(LIMITS, LetterTokenizer(), StepCost((64,), (0.01,)))


def text(tokens: int, priority: int = QUERY) -> GenerationRequest:
    return replace(request(tokens, task=Task.EMBED), service=ServiceLevel(priority=priority))


def submit(worker: TextBatcher, texts: Iterable[GenerationRequest]) -> list[str]:
    """Submit texts and return their ids."""
    names = []
    for each in texts:
        worker.admission.check(each)
        worker.submit(each)
        names.append(each.request_id)
    return names


def planned(plan: StepPlan | None) -> list[str]:
    return [] if plan is None else [work.sequence.request.request_id for work in plan.work]


LENGTHS = st.lists(st.integers(1, 40), max_size=30)


@given(LENGTHS, st.integers(1, 40), st.integers(0, 5))
def test_query_is_in_the_next_step(documents: list[int], length: int, steps: int) -> None:
    """A query that arrives during a step is in the next one, whatever documents wait."""
    worker = batcher()
    submit(worker, (text(tokens, DOCUMENT) for tokens in documents))
    for _ in range(steps):
        plan = worker.plan()
        if plan is not None:
            worker.render(worker.apply(plan, FakeExecutor().execute(plan)))
    under_way = worker.plan()
    (query,) = submit(worker, [text(length)])
    if under_way is not None:
        worker.render(worker.apply(under_way, FakeExecutor().execute(under_way)))
    assert planned(worker.plan()) == [query]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(-2, 3)), max_size=40))
def test_every_text_is_computed_once_within_bounds(texts: list[tuple[int, int]]) -> None:
    """Each text is in exactly one step of one class, and only a single text exceeds the bound."""
    worker = batcher()
    names = submit(worker, [text(tokens, priority) for tokens, priority in texts])
    ran: list[str] = []
    for step in run_until_idle(worker, FakeExecutor()):
        classes = {w.sequence.request.service.priority >= DOCUMENT for w in step.plan.work}
        assert len(classes) == 1
        bound = LIMITS.batch_step_tokens if classes == {True} else LIMITS.max_step_tokens
        assert step.plan.num_tokens <= bound or len(step.plan.work) == 1
        ran += planned(step.plan)
        for work, (name, delta) in zip(step.plan.work, step.deltas, strict=True):
            assert delta.pooled == pooled_state(work)
            assert (delta.finish_reason, delta.token_ids) == (FinishReason.STOP, ())
            assert name == work.sequence.request.request_id
    priorities = [priority for _, priority in texts]
    order = sorted(range(len(texts)), key=lambda index: (priorities[index], index))
    assert ran == [names[index] for index in order]
    assert worker.open_requests == ()
    assert worker.load().prompt_tokens == worker.load().waiting == worker.load().running == 0


def test_documents_run_in_the_time_that_queries_leave() -> None:
    """With a query in every second step, a document runs in each of the other steps."""
    worker = batcher()
    documents = submit(worker, [text(16, DOCUMENT) for _ in range(10)])
    ran = []
    for index in range(20):
        if index % 2 == 0:
            submit(worker, [text(5)])
        plan = worker.plan()
        assert plan is not None
        ran += planned(plan)
        worker.render(worker.apply(plan, FakeExecutor().execute(plan)))
    assert [name for name in ran if name in documents] == documents


@pytest.mark.parametrize(
    ("each", "param"),
    [(text(41), "prompt"), (request(4), "model"), (request((), task=Task.EMBED), "prompt")],
)
def test_impossible_request_is_rejected(each: GenerationRequest, param: str) -> None:
    """A text that is too long or empty, and a request for text, are rejected by parameter."""
    with pytest.raises(RequestRejected) as error:
        batcher().admission.check(each)
    assert error.value.param == param


class BatcherMachine(RuleBasedStateMachine):
    """Texts arrive, are cancelled and run, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = batcher()
        self.plan: StepPlan | None = None
        self.open: dict[str, GenerationRequest] = {}

    @rule(tokens=st.integers(1, 40), priority=st.integers(-1, 2))
    def arrive(self, tokens: int, priority: int) -> None:
        each = text(tokens, priority)
        self.open[each.request_id] = each
        self.worker.submit(each)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[name]
        self.worker.cancel(name)
        self.worker.cancel(name)  # without effect

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin(self) -> None:
        self.plan = self.worker.plan()
        assert (self.plan is None) == (not self.open)
        assert set(planned(self.plan)) <= set(self.open)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def end(self) -> None:
        assert self.plan is not None
        result = FakeExecutor().execute(self.plan)
        deltas: list[tuple[str, Delta]] = self.worker.render(self.worker.apply(self.plan, result))
        names = [name for name, _ in deltas]
        assert names == [name for name in planned(self.plan) if name in self.open]
        for name in names:
            del self.open[name]
        self.plan = None

    @invariant()
    def load_counts_the_open_texts(self) -> None:
        load, running = self.worker.load(), set(planned(self.plan))
        waiting = [each for name, each in self.open.items() if name not in running]
        assert set(self.worker.open_requests) == set(self.open)
        assert load.waiting == len(waiting)
        assert load.prompt_tokens == sum(len(each.prompt_ids) for each in waiting)
        assert load.urgent == sum(each.service.priority < 0 for each in self.open.values())


TestBatcher = BatcherMachine.TestCase
