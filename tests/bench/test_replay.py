"""Replayed drafts of `bench engine` have the chosen acceptance and do not change outputs."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from bench.engine.bench_engine import BenchEngine
from bench.engine.device import Rates
from bench.engine.generation import agreement, measure_generation
from bench.engine.models import make_model
from bench.engine.serving import (
    PLAIN,
    Generation,
    Serving,
    greedy_requests,
    in_batches,
)
from bench.engine.speedup import Replayed, ReplayProposer, corrupted, measure_speedups
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.testing import check_draft
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.lab.sim.recording import load_recording
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import SpeculationMode, SpeculationPlan

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
RATES = Rates(bytes_per_s=1e9, flops_per_s=1e10)
VOCAB = 512
PROMPT = (5, 6, 7)
NEW_TOKENS = 40


def sequence_after(output: list[int], prompt: tuple[int, ...] = PROMPT) -> Sequence:
    sampling = SamplingParams(max_tokens=10_000, seed=0, temperature=0.0)
    request = GenerationRequest("0", compact(prompt), sampling, PLAIN)
    return Sequence.for_choice(0, request, ResumedChoice(0, tuple(output)))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> BenchEngine:
    folder: Path = tmp_path_factory.mktemp("model")
    model = make_model("shipped", folder, torch.float32, torch.device("cpu"))
    return BenchEngine.load(model, 32 * 400, 400)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_acceptance_matches_the_setting(acceptance: float) -> None:
    """The accepted share of 20,000 tokens in drafts of 5 is within five sigmas of the setting."""
    rng = random.Random(1)
    truth = [rng.randrange(VOCAB) for _ in range(20_000)]
    proposer = ReplayProposer.of([(PROMPT, truth)], acceptance, VOCAB)
    sequence = sequence_after([])
    while sequence.output_tokens < len(truth):
        (draft,) = proposer.propose([DraftRequest(sequence, 5)])
        check_draft(draft, 5, VOCAB)
        due = truth[sequence.output_tokens :]
        accepted = len(draft.accepted_places(due))
        sequence.token_ids.extend(due[: accepted + 1])
    proposer.forget(sequence)
    tested = proposer.tested.agreed + proposer.tested.rejected
    assert tested > 10_000
    bound = 5 * math.sqrt(tested * acceptance * (1 - acceptance))
    assert abs(proposer.tested.agreed - tested * acceptance) <= bound


def test_the_same_seed_corrupts_the_same_tokens() -> None:
    """Wrong tokens depend only on the seed, and differ from the right tokens."""
    truth = list(range(300))
    first, again, other = (corrupted(truth, 0.8, VOCAB, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(0 <= token < VOCAB for token in first)
    wrong = corrupted(truth, 0.0, VOCAB, random.Random(1))
    assert not any(a == b for a, b in zip(wrong, truth, strict=True))


def test_recorded_drafts_keep_their_lengths_and_right_tokens() -> None:
    """Every draft has the recorded length, and its right tokens are as many as recorded."""
    continuation = list(range(200, 200 + NEW_TOKENS))
    settings = Replayed("draft_model", (1,), NEW_TOKENS, 1)
    proposer = settings.proposer({PROMPT: continuation}, VOCAB)
    recording = load_recording("llama-3.1-8b")
    text = recording.texts(recording.tasks[0], 0.0)[0]
    lengths = set()
    for position in range(NEW_TOKENS - 4):
        known = tuple(continuation[position:])
        (draft,) = proposer.propose([DraftRequest(sequence_after(continuation[:position]), 4)])
        guess = text.guess("draft_model", position).first(4)
        agreed = [a == b for a, b in zip(draft.token_ids, known, strict=False)]
        assert len(draft) == guess.proposed
        assert agreed == [place < guess.agreed for place in range(len(draft))]
        lengths.add(guess.agreed)
    assert len(lengths) > 2
    with pytest.raises(ValueError, match="no drafts of eagle"):
        settings._replace(acceptance="eagle").proposer({PROMPT: continuation}, VOCAB)


def test_an_unknown_prompt_gets_no_draft() -> None:
    """The proposer returns no draft for an unknown prompt or after the end of a replay."""
    proposer = ReplayProposer.of([(PROMPT, [1, 2, 3])], 1.0, VOCAB)
    requests = [
        DraftRequest(sequence_after([], (9, 9)), 4),
        DraftRequest(sequence_after([1, 2, 3]), 4),
        DraftRequest(sequence_after([1]), 4),
    ]
    assert [draft.token_ids for draft in proposer.propose(requests)] == [(), (), (2, 3)]


@pytest.mark.long
def test_replays_do_not_change_a_token(shipped: BenchEngine) -> None:
    """Every draft length and `auto` give the outputs of the run without drafts."""
    settings = Replayed(0.8, (1, 5), new_tokens=NEW_TOKENS, rounds=1, batches=(1, 4))
    rows = measure_speedups(shipped, settings, RATES)
    assert [(row["batch"], row["policy"]) for row in rows] == [
        (batch, policy) for batch in (1, 4) for policy in ("off", "fixed:1", "fixed:5", "auto")
    ]
    for row in rows:
        assert row["equal_outputs"] == 1.0
        if row["policy"] == "off":
            assert row["proposer"] is None
            continue
        assert row["proposer"] == "replay, acceptance 0.8"
        sigma = math.sqrt(0.8 * 0.2 / row["tested_tokens"])
        assert abs(row["acceptance"] - 0.8) <= 5 * sigma + 0.001
        if row["policy"] != "auto":  # This depends on measured times.
            assert row["tokens_per_step"] > 1.3


def test_every_batch_is_prefilled_again(shipped: BenchEngine) -> None:
    """The worker computes a repeated prompt again, so that rounds have equal work."""
    prompt = shipped.model.prompts(1)
    cached = []
    with Serving(shipped.worker(speculation_policy("off"), {})) as serving:
        stepped = serving.stepped
        serving.stepped = lambda batch, load: (
            cached.extend(d.cached_tokens for _, d in batch),
            stepped(batch, load),
        )
        first, again = (serving.run(greedy_requests(prompt, 4, PLAIN)) for _ in range(2))
    assert first.outputs == again.outputs
    assert not any(cached)


def test_a_failing_step_raises_its_error(shipped: BenchEngine) -> None:
    """The benchmark raises the error of a failing step."""

    class Broken(ReplayProposer):
        def propose(self, requests):
            raise LookupError("lost")

    plan = SpeculationPlan("bench", SpeculationMode.AUTO, "replay", 2, "a test")
    worker = shipped.worker(speculation_policy("fixed:2"), {"replay": Broken({})})
    with Serving(worker) as serving, pytest.raises(LookupError, match="lost"):
        serving.run(greedy_requests(shipped.model.prompts(1), 8, plan))


def test_the_decode_window_covers_joint_decoding() -> None:
    """The window begins with the last first token and ends with the earliest last token."""
    arrivals = [(1.0, "a", 1), (2.0, "a", 2), (2.0, "b", 1), (3.0, "a", 2), (3.0, "b", 3)]
    made = Generation(0.5, {}, [*arrivals, (4.0, "b", 5)])
    assert made.decode_window == (5, 1.0)
    assert made.wall_s == 3.5
    assert Generation(0.0, {}, [(1.0, "a", 1), (2.0, "b", 1)]).decode_window == (0, 0.0)


def test_batch_1_runs_several_prompts_one_by_one() -> None:
    """Batch 1 runs several prompts one by one, and batch n runs the first n together."""
    prompts = [(n,) for n in range(10)]
    assert in_batches(prompts, 1) == [[(0,)], [(1,)], [(2,)], [(3,)]]
    assert in_batches(prompts, 8) == [prompts[:8]]


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    """The agreement has the shares of equal outputs and of tokens before a difference."""
    assert agreement([[1, 2, 3, 4], [1, 2]], [[1, 9, 3, 4], [1, 2]]) == {
        "equal_outputs": 0.5,
        "equal_tokens": 0.5,
    }


@pytest.mark.long
def test_all_modes_generate_the_same_tokens(shipped: BenchEngine) -> None:
    """All proposers give identical tokens."""
    rows = measure_generation(shipped, 16, 1)
    assert [row["who"] for row in rows] == ["off", "ngram", "draft_model", "auto"] * 3
    for row in rows:
        assert row["equal_outputs"] == 1.0
        assert row["tokens_per_s"] > 0
