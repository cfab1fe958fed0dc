"""Embeddings: prompts that share steps with other requests and return a hidden state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.errors import RequestRejected
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, Pace, Task
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import BATCH_PRIORITY, ServiceLevel
from tests.core.fakes import FakeExecutor, FakeProposer, request
from tests.core.scheduler_harness import SchedulerHarness

LENGTH = 40


class LetterTokenizer:
    """A tokenizer that decodes token i as the i-th letter."""

    vocab_size = 60
    texts = tuple(map(chr, range(65, 125)))

    def decode(self, token_ids) -> str:
        return "".join(chr(65 + token) for token in token_ids)


def embedding_worker(*tasks: Task) -> WorkerCore:
    """Return a worker with a context and a pool of `LENGTH` tokens."""
    scheduler = Scheduler(
        SchedulerConfig(4, 16),
        KvBlocks(LENGTH // 4, 4),
        speculation_policy("fixed:4"),
        {"ngram": FakeProposer()},
        StepCost((64,), (1e-3,)),
    )
    tasks = tasks or (Task.GENERATE, Task.EMBED)
    return WorkerCore(scheduler, LetterTokenizer(), LENGTH, tasks=tasks)


def to_embed(prompt: int | tuple[int, ...] = 6, **of_request: object) -> GenerationRequest:
    return request(prompt=prompt, task=Task.EMBED, **of_request)


def run(harness: SchedulerHarness) -> list[StepPlan]:
    """Run until all requests end and return the steps."""
    plans = []
    while (plan := harness.step()) is not None:
        plans.append(plan)
    harness.check_results()
    return plans


@pytest.mark.parametrize("prompt", [1, 2, 16, 17, 33, 50])
def test_embedding_computes_its_prompt_once_and_samples_nothing(prompt: int) -> None:
    """The chunks add up to the prompt, only the last chunk pools, and none samples."""
    harness = SchedulerHarness(num_blocks=16, max_step_tokens=16)
    harness.add(prompt=prompt, task=Task.EMBED)
    plans = run(harness)
    works = [work for plan in plans for work in plan.work]
    assert sum(work.num_tokens for work in works) == prompt
    assert [plan.pooled for plan in plans] == [()] * (len(plans) - 1) + [(0,)]
    assert not any(work.samples or work.num_drafts for work in works)
    fed_as_a_decode = sum(
        work.num_tokens for plan in plans if not plan.chunks for work in plan.work
    )
    assert sum(plan.prompt_tokens for plan in plans) == prompt - fed_as_a_decode


def test_embedding_and_generation_share_cached_prompts() -> None:
    """Each kind of request reuses the blocks of the other kind, except for the last token."""
    prompt = tuple(range(1, 14))
    for first, second in ((Task.GENERATE, Task.EMBED), (Task.EMBED, Task.GENERATE)):
        harness = SchedulerHarness(num_blocks=16)
        harness.add(prompt=prompt, max_tokens=2, task=first)
        run(harness)
        again = harness.add(prompt=prompt, max_tokens=2, task=second)
        works = [work for plan in run(harness) for work in plan.work]
        assert again.cached_tokens == 12
        assert works[0].token_ids == (13,)


def test_embedding_shares_steps_with_decodes() -> None:
    """Decodes and their drafts continue in the steps that embed a prompt."""
    harness = SchedulerHarness(num_blocks=32, max_step_tokens=16, batching="fixed:8", wrong=0.0)
    harness.add(prompt=3, max_tokens=30, drafts=2, ignore_eos=True)
    harness.step()
    harness.add(prompt=40, task=Task.EMBED)
    shared = [plan for plan in run(harness) if len(plan.work) == 2]
    assert len(shared) >= 4
    assert all(sum(work.samples for work in plan.work) == 1 for plan in shared)


@pytest.mark.parametrize("task", [Task.EMBED, Task.GENERATE])
@pytest.mark.parametrize("steps", [1, 2])
def test_online_prompts_precede_documents(task: Task, steps: int) -> None:
    """A query or a chat that arrives is in the next step, and documents run in their order."""
    harness = SchedulerHarness(num_blocks=64, max_num_seqs=8, max_step_tokens=16)
    batch = ServiceLevel(priority=BATCH_PRIORITY)
    prompts = [tuple(range(start, start + 40)) for start in (100, 200, 300)]
    documents = [harness.add(prompt=each, task=Task.EMBED, service=batch) for each in prompts]
    for _ in range(steps):
        harness.step()
    query = harness.add(prompt=12, task=task, max_tokens=1)  # a prompt that they do not share
    plan = harness.step()
    assert plan is not None
    assert [w.num_tokens for w in plan.work if w.sequence is query] == [12]
    assert {w.sequence for w in plan.work} <= {query, documents[0]}
    ended: list[Sequence] = [query]
    while harness.step() is not None:
        ended += [s for s in documents if s.finish_reason is not None and s not in ended]
    assert ended == [query, *documents]
    harness.check_results()


def test_preempted_embedding_is_recomputed() -> None:
    """Older growing sequences take the blocks of an embedding, and its result stays the same."""
    harness = SchedulerHarness(
        num_blocks=12, max_num_seqs=4, max_step_tokens=4, batching="decode_first"
    )
    for _ in range(2):
        harness.add(prompt=3, max_tokens=20, ignore_eos=True)
    late = harness.add(prompt=32, task=Task.EMBED)
    run(harness)
    assert late.preemptions > 0
    assert late.finish_reason is FinishReason.STOP


def test_paused_embedding_resumes() -> None:
    """A pause between chunks removes an embedding from the batch, and an embedding paused in its
    last step still ends."""
    harness = SchedulerHarness(num_blocks=16, max_step_tokens=16)
    paused, last = harness.add(prompt=33, task=Task.EMBED), harness.add(prompt=3, task=Task.EMBED)
    harness.step()
    harness.scheduler.set_pace(paused, Pace.PAUSED)
    harness.step()
    assert harness.scheduler.running == ()
    assert last.finish_reason is FinishReason.STOP
    assert harness.scheduler.load().paused == 1
    harness.scheduler.set_pace(paused, Pace.SPARING)
    while paused.pending_tokens > 1:
        harness.step()
    plan = harness.scheduler.plan()
    harness.scheduler.set_pace(paused, Pace.PAUSED)
    harness.apply(plan)
    harness.check_results()


def test_embedding_is_delivered_in_one_delta() -> None:
    """The delta contains only the vector, the finish reason and the cached tokens."""
    worker, executor = embedding_worker(), FakeExecutor()
    embedding = to_embed(20)
    worker.admission.check(embedding)
    deliveries: list[tuple[str, Delta]] = []
    for again in (embedding, replace(embedding, request_id="again")):
        worker.submit(again)
        while (plan := worker.plan()) is not None:
            deliveries += worker.complete(plan, executor.execute(plan))
    stop = FinishReason.STOP
    assert deliveries == [
        (embedding.request_id, Delta(0, (), "", finish_reason=stop, pooled=b"0@19")),
        ("again", Delta(0, (), "", finish_reason=stop, cached_tokens=16, pooled=b"1@19")),
    ]
    assert worker.open_requests == ()


def test_embedding_cancelled_in_its_last_step_is_dropped() -> None:
    """The worker drops a cancelled embedding and still delivers the other embedding of the step."""
    worker, executor = embedding_worker(), FakeExecutor()
    cancelled, remaining = to_embed(3), to_embed((9, 8, 7))
    worker.submit(cancelled)
    worker.submit(remaining)
    plan = worker.plan()
    assert plan.pooled == (0, 1)
    worker.cancel(cancelled.request_id)
    deliveries = worker.complete(plan, executor.execute(plan))
    assert [(request_id, delta.pooled) for request_id, delta in deliveries] == [
        (remaining.request_id, b"1@2")
    ]
    load = worker.load()
    assert (load.running, load.kv_blocks_free) == (0, load.kv_blocks_total)


def test_embedding_may_fill_the_context() -> None:
    """An embedding may fill the context, and a longer prompt is rejected with both lengths."""
    worker = embedding_worker()
    worker.admission.check(to_embed(LENGTH))
    with pytest.raises(
        RequestRejected, match=r"40 tokens, but 41 were requested \(41 in the prompt\)$"
    ) as refused:
        worker.admission.check(to_embed(LENGTH + 1))
    assert (refused.value.param, refused.value.limit_tokens) == ("prompt", LENGTH)


def test_embedding_is_rejected_without_hidden_states() -> None:
    """A worker without hidden states, such as the simulator, rejects embeddings."""
    with pytest.raises(RequestRejected, match="does not embed texts; use /v1/completions"):
        embedding_worker(Task.GENERATE).admission.check(to_embed())
