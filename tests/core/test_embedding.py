"""Sequences that are embedded: a prompt in the steps of all others, a hidden state at its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.errors import RequestRejected
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, Pace, Task
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from tests.core.fakes import FakeExecutor, FakeProposer, request
from tests.core.house import House

LENGTH = 40


class Letters:
    """Token i is the i-th letter."""

    vocab_size = 60
    texts = tuple(map(chr, range(65, 125)))

    def decode(self, token_ids) -> str:
        return "".join(chr(65 + token) for token in token_ids)


def bench(**of_worker: object) -> WorkerCore:
    """A worker whose context and pool hold `LENGTH` tokens."""
    scheduler = Scheduler(
        SchedulerConfig(4, 16),
        KvBlocks(LENGTH // 4, 4),
        speculation_policy("fixed:4"),
        {"ngram": FakeProposer()},
        StepCost((64,), (1e-3,)),
    )
    return WorkerCore(scheduler, Letters(), LENGTH, **{"embeds": True, **of_worker})


def to_embed(prompt: int | tuple[int, ...] = 6, **of_request: object) -> GenerationRequest:
    return request(prompt=prompt, task=Task.EMBED, **of_request)


def run(house: House) -> list[StepPlan]:
    """Run to the end; return the steps."""
    plans = []
    while (plan := house.step()) is not None:
        plans.append(plan)
    house.check_results()
    return plans


@pytest.mark.parametrize("prompt", [1, 2, 16, 17, 33, 50])
def test_a_prompt_is_computed_once_and_no_token_is_drawn(prompt: int) -> None:
    """Chunks add up to the prompt, the last one pools, none samples, whatever is left for it."""
    house = House(num_blocks=16, max_step_tokens=16)
    house.add(prompt=prompt, task=Task.EMBED)
    plans = run(house)
    works = [work for plan in plans for work in plan.work]
    assert sum(work.num_tokens for work in works) == prompt
    assert [plan.pooled for plan in plans] == [()] * (len(plans) - 1) + [(0,)]
    assert not any(work.samples or work.num_drafts for work in works)
    fed_as_a_decode = sum(
        work.num_tokens for plan in plans if not plan.chunks for work in plan.work
    )
    assert sum(plan.prompt_tokens for plan in plans) == prompt - fed_as_a_decode


def test_a_prompt_that_is_cached_is_computed_at_its_last_token_alone() -> None:
    """What generation computed is shared, but for the last block; and the other way round."""
    prompt = tuple(range(1, 14))
    for first, second in ((Task.GENERATE, Task.EMBED), (Task.EMBED, Task.GENERATE)):
        house = House(num_blocks=16)
        house.add(prompt=prompt, max_tokens=2, task=first)
        run(house)
        again = house.add(prompt=prompt, max_tokens=2, task=second)
        works = [work for plan in run(house) for work in plan.work]
        assert again.cached_tokens == 12
        assert works[0].token_ids == (13,)


def test_it_joins_the_steps_of_others() -> None:
    """Decodes go on in the very steps in which a prompt is embedded, with their drafts."""
    house = House(num_blocks=32, max_step_tokens=16, batching="fixed:8", wrong=0.0)
    house.add(prompt=3, max_tokens=30, drafts=2, ignore_eos=True)
    house.step()
    house.add(prompt=40, task=Task.EMBED)
    shared = [plan for plan in run(house) if len(plan.work) == 2]
    assert len(shared) >= 4
    assert all(plan.num_sampling == 1 for plan in shared)


def test_one_that_is_preempted_is_computed_again() -> None:
    """Its blocks are taken for older sequences that grow, and its end is the same."""
    house = House(num_blocks=12, max_num_seqs=4, max_step_tokens=4, batching="decode_first")
    for _ in range(2):
        house.add(prompt=3, max_tokens=20, ignore_eos=True)
    late = house.add(prompt=32, task=Task.EMBED)
    run(house)
    assert late.preemptions > 0
    assert late.finish_reason is FinishReason.STOP


def test_one_that_is_paused_waits_and_goes_on() -> None:
    """Between its chunks it leaves the batch; in its last step it ends all the same."""
    house = House(num_blocks=16, max_step_tokens=16)
    paused, last = house.add(prompt=33, task=Task.EMBED), house.add(prompt=3, task=Task.EMBED)
    house.step()
    house.scheduler.set_pace(paused, Pace.PAUSED)
    house.step()
    assert house.scheduler.running == ()
    assert last.finish_reason is FinishReason.STOP
    assert house.scheduler.load().paused == 1
    house.scheduler.set_pace(paused, Pace.SPARING)
    while paused.pending_tokens > 1:
        house.step()
    plan = house.scheduler.plan()
    house.scheduler.set_pace(paused, Pace.PAUSED)
    house.apply(plan)
    house.check_results()


def test_a_worker_tells_it_in_one_delta() -> None:
    """The vector, why it ended and what was cached; no token, no text, nothing of speculation."""
    worker, executor = bench(), FakeExecutor()
    wanted = to_embed(20)
    worker.admission.check(wanted)
    told: list[tuple[str, Delta]] = []
    for again in (wanted, replace(wanted, request_id="again")):
        worker.submit(again)
        while (plan := worker.plan()) is not None:
            told += worker.complete(plan, executor.execute(plan))
    stop = FinishReason.STOP
    assert told == [
        (wanted.request_id, Delta(0, (), "", finish_reason=stop, embedding=b"0@19")),
        ("again", Delta(0, (), "", finish_reason=stop, cached_tokens=16, embedding=b"1@19")),
    ]
    assert worker.open_requests == ()


def test_one_that_leaves_in_its_last_step_is_told_nothing() -> None:
    """What a step gives for a cancelled sequence is dropped; the one beside it gets its own."""
    worker, executor = bench(), FakeExecutor()
    leaves, stays = to_embed(3), to_embed((9, 8, 7))
    worker.submit(leaves)
    worker.submit(stays)
    plan = worker.plan()
    assert plan.pooled == (0, 1)
    worker.cancel(leaves.request_id)
    told = worker.complete(plan, executor.execute(plan))
    assert [(request_id, delta.embedding) for request_id, delta in told] == [
        (stays.request_id, b"1@2")
    ]
    load = worker.load()
    assert (load.running, load.kv_blocks_free) == (0, load.kv_blocks_total)


def test_a_prompt_as_long_as_the_context_is_embedded() -> None:
    """It needs no room for output; one token more is refused with both numbers."""
    worker = bench()
    worker.admission.check(to_embed(LENGTH))
    with pytest.raises(
        RequestRejected, match=r"holds 40 tokens, but the prompt has 41$"
    ) as refused:
        worker.admission.check(to_embed(LENGTH + 1))
    assert (refused.value.param, refused.value.limit_tokens) == ("prompt", LENGTH)


def test_a_worker_without_hidden_states_refuses() -> None:
    """As the simulator: there is nothing to pool."""
    with pytest.raises(RequestRejected, match="does not support embeddings"):
        bench(embeds=False).admission.check(to_embed())
