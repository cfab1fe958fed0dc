"""Sparse self-drafting: drafts read a bounded number of keys and do not change the text."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.prompts import held_out_prompts
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.inputs import StepInputs, slots_of
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KV_TILE, KvPool, Layers
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.operators.pieces import pieces_of
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.proposers.sparse_self import SparseSelfProposer
from draftgate.backends.engine.runner import Runner
from draftgate.backends.types import GenerationRequest, ResumedChoice
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import (
    COST,
    Engine,
    Model,
    Outcome,
    RandomSlots,
    Setup,
    request,
    run,
)
from tests.engine.reference_logits import adjusted
from tests.engine.test_joint_distribution import NEW_TOKENS, VOCAB, write_checkpoint
from tests.examples import grid
from tests.kernels.distributions import ALPHA, filtered_distribution, p_value

NAME = "sparse_self"
BUDGET, SINK = 64, 16
TEMPERATURES = grid((0.0, 0.8), quick=lambda temperature: temperature > 0)

# Most contexts exceed the budget: prompts have 40 to 240 tokens and outputs 48.
BATCHINGS = {
    "alone": ("fixed:5", {"max_num_seqs": 1}),
    "together": ("fixed:4", {"max_num_seqs": 16}),
    "in small chunks": ("random", {"max_num_seqs": 6, "max_step_tokens": 37}),
    "preempted": ("random", {"max_num_seqs": 16, "max_step_tokens": 128, "num_blocks": 24}),
}


def proposer_of(
    model: Model, pool: KvPool, budget: int = BUDGET, decoder: Decoder | None = None
) -> SparseSelfProposer:
    return SparseSelfProposer(
        Runner(decoder or model.decoder, pool, model.verify).forward,
        budget_tokens=budget,
        sink_tokens=SINK,
        eos_ids=model.config.eos_ids,
        keep_distributions=model.verify == "rejection",
        cost=COST,
    )


def setup(policy: SpeculationPolicy, budget: int = BUDGET, **batching: int) -> Setup:
    def proposers(engine: Engine) -> dict[str, Proposer]:
        return {"ngram": NgramProposer(), NAME: proposer_of(engine.model, engine.pool, budget)}

    return Setup(policy, proposers, **batching)


def drafted_by(name: str, requests: Iterable[GenerationRequest]) -> list[GenerationRequest]:
    return [
        replace(each, speculation=replace(each.speculation, proposer=name)) for each in requests
    ]


def make_requests(
    model: Model, policy: SpeculationPolicy, count: int, *, temperature: float, new_tokens: int = 48
) -> list[GenerationRequest]:
    settings = {"temperature": temperature, "max_tokens": new_tokens}
    return [
        request(str(index), prompt, policy, seed=index, **settings)
        for index, prompt in enumerate(held_out_prompts(model.tokenizer, count))
    ]


def long_text(model: Model, tokens: int) -> list[int]:
    parts = held_out_prompts(model.tokenizer, 12, seed=8, least=200, most=240)
    text = list(itertools.chain(*parts))[:tokens]
    assert len(text) == tokens
    return text


class Context:
    """A sequence in scattered blocks with a pending last token and computed earlier tokens."""

    def __init__(
        self, model: Model, tokens: list[int], spare: int = 16, **sampling: object
    ) -> None:
        blocks = list(range(1, 2 + (len(tokens) + spare) // BLOCK_TOKENS))
        random.Random(len(tokens)).shuffle(blocks)
        self.pool = KvPool(model.config, len(blocks) + 1, model.dtype)
        self.runner = Runner(model.decoder, self.pool, model.verify)
        choice_request = request("context", tokens, Off(), **sampling)
        self.sequence = Sequence.for_choice(0, choice_request, ResumedChoice(0, ()))
        self.sequence.block_table = blocks
        self.sequence.num_computed = len(tokens) - 1
        prefill = SequenceWork(self.sequence, 0, tuple(tokens[:-1]), samples=False)
        self.runner.logits(StepPlan((prefill,)))

    def verify(self, draft: Draft = Draft()) -> SequenceWork:  # noqa: B008 - immutable
        last = (self.sequence.token_ids[-1],)
        return SequenceWork(self.sequence, self.sequence.num_computed, last, True, draft)

    def kv(self, tokens: int) -> torch.Tensor:
        return kv_of(self.pool, self.sequence.block_table, tokens)


def kv_of(pool: KvPool, table: list[int], tokens: int) -> torch.Tensor:
    """Copy the keys and values of the first tokens, as [strips, tokens, head_dim]."""
    slots = slots_of(table, range(tokens))
    return torch.cat([layer[:, slots] for layer in pool.layers])


class RecordingDecoder(Decoder):
    """A decoder that records its inputs."""

    def __init__(self, decoder: Decoder) -> None:
        self.__dict__.update(decoder.__dict__)
        self.seen: list[StepInputs] = []

    def forward(self, inputs: StepInputs, kv: Layers) -> torch.Tensor:
        self.seen.append(inputs)
        return super().forward(inputs, kv)


def slots_read(inputs: StepInputs) -> list[int]:
    """Return all slots of the single span of a step in order."""
    (span,) = inputs.spans
    return list(
        itertools.chain(*(map(int, piece.slots) for piece in pieces_of(span, BLOCK_TOKENS)))
    )


# --- text --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_sparse_drafts_do_not_change_the_text(shipped: Model, temperature: float) -> None:
    """Sparse drafts of any length change no token, alone, in batches, in chunks and with
    preemptions."""
    plain_requests = make_requests(shipped, Off(), 6, temperature=temperature)
    plain = run(shipped, plain_requests, Setup(max_num_seqs=1)).tokens
    outcomes: dict[str, Outcome] = {}
    for name, (policy_name, batching) in BATCHINGS.items():
        random_slots = RandomSlots(random.Random(2))
        policy = random_slots if policy_name == "random" else speculation_policy(policy_name)
        requests = drafted_by(NAME, make_requests(shipped, policy, 6, temperature=temperature))
        outcome = outcomes[name] = run(shipped, requests, setup(policy, **batching))
        assert outcome.tokens == plain, name
        assert outcome.accepted > 50
        assert outcome.rejected > 50
        assert outcome.leaked_blocks == 0
    assert outcomes["preempted"].preemptions > 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_sparse_drafts_do_not_change_a_long_text(shipped: Model, temperature: float) -> None:
    """Sparse and n-gram drafts do not change texts whose context is ten budgets long."""
    policy = speculation_policy("fixed:4")
    text = long_text(shipped, 900)

    def requests(policy: SpeculationPolicy) -> list[GenerationRequest]:
        settings = {"temperature": temperature, "max_tokens": 40}
        prompts = [text[:700], text[100:860], text[300:400], text[:250]]
        return [request(str(i), p, policy, seed=i, **settings) for i, p in enumerate(prompts)]

    plain = run(shipped, requests(Off()), Setup(max_num_seqs=1))
    first, *others, last = requests(policy)
    mixed = [*drafted_by(NAME, [first, *others]), *drafted_by("ngram", [last])]
    outcome = run(shipped, mixed, setup(policy, budget=80))
    assert outcome.tokens == plain.tokens
    assert min(outcome.accepted, outcome.rejected) > 10


@pytest.mark.parametrize("window", [32, 200])
def test_windows_of_any_length_are_lossless(checkpoint_copy: Path, window: int) -> None:
    """Sliding windows change no text, and the target rejects no draft if the window is within the
    latest pages. A longer window reads sinks that are outside the window of the target."""
    config = json.loads((checkpoint_copy / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    (checkpoint_copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = Model(checkpoint_copy)
    policy, text = speculation_policy("fixed:4"), long_text(model, 600)

    def requests(policy: SpeculationPolicy) -> list[GenerationRequest]:
        return [request(str(i), text[: 300 + 90 * i], policy, max_tokens=32) for i in range(4)]

    plain = run(model, requests(Off()), Setup(max_num_seqs=1))
    drafted = run(model, drafted_by(NAME, requests(policy)), setup(policy))
    assert drafted.tokens == plain.tokens
    assert drafted.accepted > 10
    assert (drafted.rejected == 0) == (window == 32)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_draft_within_the_budget_is_always_accepted(shipped: Model, temperature: float) -> None:
    """If the context fits into the budget, a draft computes the same bits as a verify step, so
    every draft is accepted."""
    policy = speculation_policy("fixed:5")
    requests = drafted_by(NAME, make_requests(shipped, policy, 8, temperature=temperature))
    outcome = run(shipped, requests, setup(policy, budget=BLOCK_TOKENS * 18))
    assert outcome.accepted > 200
    assert outcome.rejected == 0


# --- rejection --------------------------------------------------------------------------------

PROMPT = [3] * BLOCK_TOKENS + [4] * BLOCK_TOKENS + [1, 3, 0] * 4
NARROW = 2 * BLOCK_TOKENS
"""A budget for the first and the last page, which hides the page between them from drafts."""

REQUESTS = 2000


def distribution_of_texts(model: Model, generation: GenerationRequest) -> list[float]:
    """Return the probability of each text of `NEW_TOKENS` tokens after the prompt, in order."""
    context, logits = Context(model, PROMPT), {}
    for text in itertools.product(range(VOCAB), repeat=NEW_TOKENS - 1):
        rows = context.runner.logits(StepPlan((context.verify(Draft(text)),))).tolist()
        logits |= {text[:length]: row for length, row in enumerate(rows)}
    distribution = {(): 1.0}
    sampling = generation.sampling
    for _ in range(NEW_TOKENS):
        rows = {t: adjusted(logits[t], PROMPT, t, sampling) for t in distribution}
        following = {t: filtered_distribution(r, sampling.temperature) for t, r in rows.items()}
        distribution = {
            (*text, token): probability * following[text][token]
            for text, probability in distribution.items()
            for token in range(VOCAB)
        }
    return list(distribution.values())


def far_sighted(directory: Path) -> Path:
    """Make a model depend on the mean of its context."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 0
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 2
    tensors["lm_head.weight"] *= 2
    save_file(tensors, path)
    return directory


def test_rejection_keeps_the_distribution_of_texts(tmp_path: Path) -> None:
    """With drafts from a narrow view of the context, texts have the same distribution as without
    drafts."""
    model = Model(far_sighted(write_checkpoint(tmp_path)), verify="rejection")
    policy = RandomSlots(random.Random(3))
    settings = {"max_tokens": NEW_TOKENS, "temperature": 1.1, "presence_penalty": -0.4}
    requests = [request(str(i), PROMPT, policy, seed=i, **settings) for i in range(REQUESTS)]
    drafting = setup(policy, NARROW, max_num_seqs=128)
    outcome = run(model, drafted_by(NAME, requests), drafting)
    assert outcome.accepted > REQUESTS // 2
    assert outcome.rejected > REQUESTS // 10
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=NEW_TOKENS), 0)
    for tokens in outcome.tokens.values():
        counts[tuple(tokens)] += 1
    assert p_value(list(counts.values()), distribution_of_texts(model, requests[0])) > ALPHA


# --- keys and values --------------------------------------------------------------------------


def confirmed_kv(
    model: Model, requests: list[GenerationRequest], how: Setup
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the keys and values of all computed tokens of each sequence after each step."""
    engine = Engine(model, how)
    for each in requests:
        engine.worker.submit(each)
    for _ in run_until_idle(engine.worker, engine.runner):
        for sequence in engine.scheduler.running:
            kv = kv_of(engine.pool, sequence.block_table, sequence.num_computed)
            yield sequence.request.request_id, kv


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_confirmed_keys_and_values_equal_those_without_drafts(
    shipped: Model, temperature: float
) -> None:
    """Keys and values of confirmed tokens have the same bits with and without drafts."""
    plain_kv = dict(
        confirmed_kv(shipped, make_requests(shipped, Off(), 4, temperature=temperature), Setup())
    )
    policy = RandomSlots(random.Random(7))
    requests = drafted_by(NAME, make_requests(shipped, policy, 4, temperature=temperature))
    compared = 0
    for request_id, kv in confirmed_kv(shipped, requests, setup(policy, num_blocks=40)):
        tokens = min(kv.shape[1], plain_kv[request_id].shape[1])
        assert torch.equal(kv[:, :tokens], plain_kv[request_id][:, :tokens])
        compared += tokens
    assert compared > 4000


def test_verify_step_overwrites_keys_and_values_of_drafts(shipped: Model) -> None:
    """A verify step overwrites all keys and values that drafting wrote after the sequence."""
    text = long_text(shipped, 400)
    drafting, plain = Context(shipped, text), Context(shipped, text)
    (draft,) = proposer_of(shipped, drafting.pool).propose([DraftRequest(drafting.sequence, 5)])
    plan = [StepPlan((context.verify(draft),)) for context in (drafting, plain)]
    plain.runner.logits(plan[1])
    tokens = len(text) + len(draft) - 1
    assert torch.equal(drafting.kv(len(text) - 1), plain.kv(len(text) - 1))
    assert not torch.equal(drafting.kv(len(text)), plain.kv(len(text)))
    drafting.runner.logits(plan[0])
    assert torch.equal(drafting.kv(tokens), plain.kv(tokens))


@pytest.mark.parametrize("verified", [0, 2])
def test_unverified_drafts_leave_nothing_that_is_read(shipped: Model, verified: int) -> None:
    """Draft tokens that were not verified do not change the target's logits."""
    text = long_text(shipped, 380)
    drafting, plain = Context(shipped, text), Context(shipped, text)
    (draft,) = proposer_of(shipped, drafting.pool).propose([DraftRequest(drafting.sequence, 12)])
    for context in (drafting, plain):
        context.runner.logits(StepPlan((context.verify(draft.first(verified)),)))
    for token in (5, 6, 7, 8):
        rows = []
        for context in (drafting, plain):
            context.sequence.num_computed += 1
            context.sequence.token_ids.append(token)
            rows.append(context.runner.logits(StepPlan((context.verify(),))))
        assert torch.equal(*rows)


# --- tokens read by drafting ---------------------------------------------------------------------


@pytest.mark.parametrize("budget", [BUDGET, 2 * KV_TILE])
def test_tokens_read_by_drafting_do_not_grow_with_the_context(shipped: Model, budget: int) -> None:
    """A chain reads a bounded number of KV tokens, and a verify step reads the whole context."""
    read, verified = [], []
    for tokens in (budget + 40, 800, 1000):
        context = Context(shipped, long_text(shipped, tokens))
        decoder = RecordingDecoder(shipped.decoder)
        proposer = proposer_of(shipped, context.pool, budget, decoder)
        (draft,) = proposer.propose([DraftRequest(context.sequence, 6)])
        assert len(draft) == len(decoder.seen) == 6
        assert all(inputs.spans.starts[0] < budget for inputs in decoder.seen)
        read.append([len(slots_read(inputs)) for inputs in decoder.seen])
        decoder.seen.clear()
        Runner(decoder, context.pool).logits(StepPlan((context.verify(draft),)))
        verified.append(len(slots_read(decoder.seen[0])))
    assert all(slots == [-(-budget // KV_TILE) * KV_TILE] * 6 for slots in read)
    assert verified[0] < verified[-1]
    assert verified[-1] >= 1000


@pytest.mark.parametrize("tokens", [30, 64, 65, 399, 400, 1000])
def test_draft_reads_the_first_and_the_latest_pages(shipped: Model, tokens: int) -> None:
    """A draft token is written and rotated at its true position despite the omitted pages."""
    context, decoder = (
        Context(shipped, long_text(shipped, tokens)),
        RecordingDecoder(shipped.decoder),
    )
    request = DraftRequest(context.sequence, 6)
    proposer_of(shipped, context.pool, decoder=decoder).propose([request])
    table = context.sequence.block_table
    for position, inputs in enumerate(decoder.seen, start=tokens - 1):
        last_page = position // BLOCK_TOKENS
        oldest = max(SINK, (last_page - (BUDGET - SINK) // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        shown = [*range(min(SINK, position + 1)), *range(oldest, position + 1)]
        place = inputs.spans.starts[0]
        assert slots_read(inputs)[: place + 1] == slots_of(table, shown)
        assert inputs.positions[0] == position
        assert inputs.slots[0] == slots_of(table, [position])[0]


# --- proposer protocol ----------------------------------------------------------------------------


def test_evidence_is_the_probability_of_the_first_draft(shipped: Model) -> None:
    """The evidence is the target's probability of the first draft in per mille."""
    evidence = []
    for tokens in (90, 100, 110, 120):
        context = Context(shipped, long_text(shipped, tokens), temperature=0.8, seed=3)
        rows = context.runner.logits(StepPlan((context.verify(),)))
        proposer = proposer_of(shipped, context.pool, 2 * KV_TILE)
        (draft,) = proposer.propose([DraftRequest(context.sequence, 3)])
        evidence.append(draft.evidence)
        assert draft.evidence == round(1000 * rows[0].softmax(0)[draft.token_ids[0]].item())
    assert len(set(evidence)) > 1


def test_sequence_with_several_pending_tokens_gets_no_draft(shipped: Model) -> None:
    """Other sequences in the same call receive their usual drafts."""
    context = Context(shipped, long_text(shipped, 200))
    waiting = replace(context.sequence, key=1, num_computed=100)
    draft_requests = [DraftRequest(each, 3) for each in (waiting, context.sequence)]
    proposer = proposer_of(shipped, context.pool)
    (alone,) = proposer.propose(draft_requests[1:])
    assert proposer.propose(draft_requests) == [Draft(), alone]
    assert len(alone) == 3
    assert proposer.propose([]) == []


def test_depth_cost_is_a_step_that_reads_the_budget(shipped: Model) -> None:
    """The cost of a depth equals the cost of a step with one token and one budget of context per
    sequence."""
    cost = StepCost((4, 16), (1e-3, 2e-3), kv_token_s=1e-6, sequence_s=1e-4)
    pool = KvPool(shipped.config, 1, shipped.dtype)
    settings = {"eos_ids": frozenset[int](), "keep_distributions": False, "cost": cost}
    proposer = SparseSelfProposer(
        Runner(shipped.decoder, pool).forward, budget_tokens=BUDGET, sink_tokens=SINK, **settings
    )
    assert proposer.depth_s(1) == pytest.approx(1e-3 + 64e-6 + 1e-4)
    assert proposer.depth_s(8) == pytest.approx(2e-3 + 8 * (64e-6 + 1e-4))


@pytest.mark.parametrize(
    ("budget", "sink"), [(0, 16), (-64, 16), (16, 16), (31, 16), (47, 17), (64, 0), (64, -1)]
)
def test_budget_without_a_page_for_latest_tokens_is_rejected(
    shipped: Model, budget: int, sink: int
) -> None:
    """Sizes must be positive and leave a whole page for the latest tokens."""
    forward = Runner(shipped.decoder, KvPool(shipped.config, 1, shipped.dtype)).forward
    settings = {"eos_ids": frozenset[int](), "keep_distributions": False, "cost": COST}

    def build(tokens: int, sink: int) -> SparseSelfProposer:
        sizes = {"budget_tokens": tokens, "sink_tokens": sink}
        return SparseSelfProposer(forward, **sizes, **settings)

    with pytest.raises(ValueError, match="budget_tokens must be at least"):
        build(budget, sink)
    assert build(32, 1)
    assert build(48, 17)
