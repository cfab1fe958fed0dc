"""The worker core, which turns requests into deltas."""

from __future__ import annotations

from functools import cache

import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.errors import RequestRejected
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, Pace
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from tests.core.fakes import FakeExecutor, FakeProposer, hashed_token, request, scripted


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED_MODEL)


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


EOS = tokenizer().special_id("eos_token")


class WorkerHarness:
    """A worker with a fake device."""

    def __init__(self, true_token=hashed_token, num_blocks=64, max_model_len=200, max_num_seqs=8):
        self.blocks = KvBlocks(num_blocks, 4)
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs, 64, frozenset({EOS})),
            self.blocks,
            speculation_policy("fixed:8"),
            {"ngram": FakeProposer(true_token)},
            StepCost((64,), (1e-3,)),
        )
        self.worker = WorkerCore(scheduler, tokenizer(), max_model_len)
        self._executor = FakeExecutor(true_token)

    def step(self) -> list[tuple[str, Delta]] | None:
        plan = self.worker.plan()
        if plan is None:
            return None
        return self.worker.complete(plan, self._executor.execute(plan))

    def run(self, *requests: GenerationRequest) -> dict[tuple[str, int], list[Delta]]:
        for each in requests:
            self.worker.admission.check(each)
            self.worker.submit(each)
        deltas_by_choice: dict[tuple[str, int], list[Delta]] = {}
        while (deltas := self.step()) is not None:
            for request_id, delta in deltas:
                deltas_by_choice.setdefault((request_id, delta.choice), []).append(delta)
        assert self.worker.open_requests == ()
        assert self.blocks.num_free == self.blocks.num_blocks
        return deltas_by_choice

    def run_one(self, generation: GenerationRequest) -> list[Delta]:
        return self.run(generation)[generation.request_id, 0]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
def test_stop_string_inside_a_draft_ends_as_without_drafts(drafts: int) -> None:
    """If a draft contains a stop string, the output ends before the stop string, as without
    drafts."""
    ids = encode("def f(x):\n    return x + 1\n\n\nclass C: pass # and more of it")
    harness = WorkerHarness(scripted(*ids))
    plain = harness.run_one(request(max_tokens=len(ids), stop=("\n\n\n",), logprobs=0))
    drafted = harness.run_one(
        request(max_tokens=len(ids), drafts=drafts, stop=("\n\n\n",), logprobs=0)
    )
    assert text_of(drafted) == text_of(plain) == "def f(x):\n    return x + 1"
    assert drafted[-1].stop_text == plain[-1].stop_text == "\n\n\n"
    assert tokens_of(drafted) == tokens_of(plain)
    assert [d.logprobs for d in plain] == [(entry,) for d in drafted for entry in d.logprobs]
    assert drafted[-1].finish_reason is FinishReason.STOP
    assert len(drafted) <= len(plain)


@pytest.mark.parametrize("drafts", [0, 3, 8])
def test_end_token_ends_the_output_without_text(drafts: int) -> None:
    """An end-of-sequence token counts as the last token and adds no text."""
    ids = [*encode("x = 1"), EOS, *encode("never shown")]
    deltas = WorkerHarness(scripted(*ids)).run_one(request(max_tokens=len(ids), drafts=drafts))
    assert text_of(deltas) == "x = 1"
    assert tokens_of(deltas) == [*encode("x = 1"), EOS]
    assert (deltas[-1].finish_reason, deltas[-1].stop_text) == (FinishReason.STOP, "")


def test_ignore_eos_continues_to_max_tokens() -> None:
    """The end token is an ordinary token with `ignore_eos`."""
    ids = [*encode("a"), EOS, *encode(" b")]
    deltas = WorkerHarness(scripted(*ids)).run_one(request(max_tokens=len(ids), ignore_eos=True))
    assert tokens_of(deltas) == ids
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_stop_string_at_the_last_token_is_reported_as_stop() -> None:
    """The reason is `stop` if a token reaches both the length and a stop string."""
    ids = encode("a = b\n")
    deltas = WorkerHarness(scripted(*ids)).run_one(request(max_tokens=len(ids), stop=("\n",)))
    assert text_of(deltas) == "a = b"
    assert (deltas[-1].finish_reason, deltas[-1].stop_text) == (FinishReason.STOP, "\n")


def test_held_back_text_is_returned_at_the_end() -> None:
    """The worker returns the beginning of an incomplete stop string at the end."""
    ids = encode("a\n")
    deltas = WorkerHarness(scripted(*ids)).run_one(request(max_tokens=len(ids), stop=("\n\n\n",)))
    assert text_of(deltas) == "a\n"


def test_every_choice_ends_once_with_its_own_outcome() -> None:
    """Each of n choices has its own tokens, one last delta, and its own speculation outcome."""
    generation = request(max_tokens=10, drafts=4, n=3, ignore_eos=True)
    deltas_by_choice = WorkerHarness().run(generation)
    assert sorted(choice for _, choice in deltas_by_choice) == [0, 1, 2]
    assert len({tuple(tokens_of(deltas)) for deltas in deltas_by_choice.values()}) == 3
    for deltas in deltas_by_choice.values():
        assert len(tokens_of(deltas)) == 10
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert [d.outcome for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        outcome = deltas[-1].outcome
        assert outcome.num_accepted_tokens == outcome.num_drafted_tokens == 10 - len(deltas)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancel_frees_every_choice_at_once(steps: int) -> None:
    """A cancelled request, queued or running, owns no blocks and receives no more deltas."""
    harness = WorkerHarness(max_num_seqs=2)
    cancelled, remaining = request(max_tokens=20, n=3, ignore_eos=True), request(max_tokens=5)
    for each in (cancelled, remaining):
        harness.worker.submit(each)
    for _ in range(steps):
        harness.step()
    harness.worker.cancel(cancelled.request_id)
    assert harness.blocks.num_free == harness.blocks.num_blocks
    harness.worker.cancel(cancelled.request_id)
    assert harness.worker.open_requests == (remaining.request_id,)
    while (deltas := harness.step()) is not None:
        assert {request_id for request_id, _ in deltas} == {remaining.request_id}
    assert harness.worker.open_requests == ()


def test_cancel_between_plan_and_result_drops_the_result() -> None:
    """A request cancelled during a step receives no tokens of that step."""
    harness = WorkerHarness()
    generation = request(max_tokens=9)
    harness.worker.submit(generation)
    plan = harness.worker.plan()
    harness.worker.cancel(generation.request_id)
    assert harness.worker.complete(plan, FakeExecutor().execute(plan)) == []
    assert harness.blocks.num_free == harness.blocks.num_blocks


def test_set_pace_applies_to_all_choices() -> None:
    """All choices of a paused request wait, and unknown and finished ids are ignored."""
    harness = WorkerHarness()
    slow, fast = request(max_tokens=9, n=2, ignore_eos=True), request(max_tokens=9)
    harness.worker.submit(slow)
    harness.worker.submit(fast)
    harness.step()
    harness.worker.set_pace(slow.request_id, Pace.PAUSED)
    harness.worker.set_pace("nobody", Pace.PAUSED)
    while (deltas := harness.step()) is not None:
        assert {request_id for request_id, _ in deltas} == {fast.request_id}
    assert harness.worker.open_requests == (slow.request_id,)
    harness.worker.cancel(slow.request_id)
    harness.worker.set_pace(slow.request_id, Pace.FULL)
    assert harness.step() is None
    assert harness.blocks.num_free == harness.blocks.num_blocks


@pytest.mark.parametrize(
    ("generation", "param", "words"),
    [
        (request(prompt=190, max_tokens=11), "max_tokens", r"length is 200 .* \(190 in .* 11 in"),
        (request(prompt=201, max_tokens=1), "prompt", "context length is 200"),
        (request(prompt=90, max_tokens=39), "max_tokens", "KV pool holds 128"),
        (request(prompt=(4096,)), "prompt", "between 0 and 4095"),
        (request(prompt=(-1,)), "prompt", "between 0 and 4095"),
        (request(prompt=()), "prompt", "no tokens"),
        (request(logit_bias=((4096, 1.0),)), "logit_bias", "between 0 and 4095"),
    ],
    ids=["output", "prompt", "pool", "unknown", "negative", "empty", "bias"],
)
def test_requests_beyond_the_limits_are_rejected(generation, param, words) -> None:
    """The worker rejects requests beyond its limits and accepts requests at its limits."""
    harness = WorkerHarness(num_blocks=32 if "pool" in words else 64, max_model_len=200)
    with pytest.raises(RequestRejected, match=words) as refused:
        harness.worker.admission.check(generation)
    assert refused.value.param == param
    WorkerHarness(max_model_len=200).worker.admission.check(request(prompt=190, max_tokens=10))
