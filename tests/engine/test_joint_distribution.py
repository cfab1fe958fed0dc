"""The joint law of several tokens under the production scheduler, against exact enumeration.

A random model of five tokens writes four; every text has a known probability. Thousands of
requests with seeds of their own share batches in which slots are given at random, and the counts
of the texts are compared with the law by chi-square tests of fixed seeds.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence as Many
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from draftgate.backends.core.draft_scores import DraftScores
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.kernels import noise, rejection_ref
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling
from draftgate.backends.engine.sampler import Verify
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.policies.costs.step_cost_fit import StepCostFit
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from tests.engine.harness import Model, RandomSlots, Setup, request, run
from tests.engine.reference_logits import adjusted
from tests.kernels.distributions import ALPHA, filtered_distribution, p_value

VOCAB = 5
NEW_TOKENS = 4
PROMPT = (3,)
REQUESTS = 4000
MANY_REQUESTS = 40_000
BLOCKS = 400
MOST_TOKENS = 16

LAWS = {
    "top-k, top-p": {"temperature": 0.9, "top_k": 4, "top_p": 0.9},
    "min-p": {"temperature": 1.4, "min_p": 0.25},
    "penalties": {
        "temperature": 1.1,
        "repetition_penalty": 1.6,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.4,
        "logit_bias": ((1, 0.7), (4, -0.5)),
        "top_p": 0.95,
    },
}


def write_checkpoint(directory: Path) -> Path:
    """Save a random Llama of five tokens whose next token depends on all before it."""
    hidden, heads, inner = 16, 2, 24
    generator = torch.Generator().manual_seed(7)

    def weight(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    layer = {
        "input_layernorm": torch.ones(hidden),
        "self_attn.q_proj": weight(hidden, hidden, 0.4),
        "self_attn.k_proj": weight(hidden // heads, hidden, 0.4),
        "self_attn.v_proj": weight(hidden // heads, hidden, 0.5),
        "self_attn.o_proj": weight(hidden, hidden, 0.5),
        "post_attention_layernorm": torch.ones(hidden),
        "mlp.gate_proj": weight(inner, hidden, 0.4),
        "mlp.up_proj": weight(inner, hidden, 0.4),
        "mlp.down_proj": weight(hidden, inner, 0.4),
    }
    tensors = {f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()}
    tensors["model.embed_tokens.weight"] = weight(VOCAB, hidden, 0.7)
    tensors["model.norm.weight"] = torch.ones(hidden)
    tensors["lm_head.weight"] = weight(VOCAB, hidden, 0.25)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = {f"<{token}>": token for token in range(VOCAB)}
    words_model = tokenizers.models.WordLevel(words, unk_token="<0>")
    tokenizers.Tokenizer(words_model).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("five_tokens"))


class LookedUp:
    """A proposer that has its drafts at hand."""

    def depth_s(self, sequences: int) -> float:
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        return [self.draft(request.sequence, request.max_tokens) for request in requests]

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        raise NotImplementedError

    def forget(self, sequence: Sequence) -> None: ...


class DrawnDrafts(LookedUp):
    """Draws drafts from laws of its own, with the noise a draft model uses: that of the output."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        logits = torch.randn(VOCAB, VOCAB, generator=generator)
        logits[1, 2] = -torch.inf  # what p holds likely may be impossible in q
        self._laws = logits.softmax(dim=1)
        self._scores = self._laws.log().tolist()

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        drafts, law = [], []
        last = sequence.token_ids[-1]
        for position in range(len(sequence.token_ids), len(sequence.token_ids) + max_tokens):
            law.append(self._laws[last])
            gumbel = output_noise(sequence.request.sampling.seed)[position]
            scores = [s + g for s, g in zip(self._scores[last], gumbel, strict=True)]
            last = scores.index(max(scores))
            drafts.append(last)
        return Draft(tuple(drafts), distributions=torch.stack(law))


class CertainDrafts(LookedUp):
    """Drafts a function of the last token: likely ones, and unlikely ones behind 1 and 4."""

    FOLLOWS = (3, 0, 3, 0, 1)

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        last, drafts = sequence.token_ids[-1], []
        for _ in range(max_tokens):
            last = self.FOLLOWS[last]
            drafts.append(last)
        return Draft(tuple(drafts))


@cache
def output_noise(seed: int) -> list[list[float]]:
    """The noise of a seed's output tokens, by position."""
    positions = torch.arange(MOST_TOKENS)
    seeds = torch.full_like(positions, seed)
    zeros = torch.zeros_like(positions)
    return noise.gumbel(seeds, zeros, positions, noise.PURPOSE_OUTPUT, VOCAB).tolist()


class Table:
    """As much of a sequence as a forward pass looks at."""

    block_table = (0,)


@cache
def logits_behind(directory: Path) -> dict[tuple[int, ...], list[float]]:
    """The model's logits behind every beginning of a text."""
    runner = Model(directory).runner(BLOCKS)
    found = {}
    for text in itertools.product(range(VOCAB), repeat=NEW_TOKENS - 1):
        plan = StepPlan((SequenceWork(Table(), 0, PROMPT, True, Draft(text)),))
        for length, row in enumerate(runner.logits(plan).tolist()):
            found[text[:length]] = row
    return found


def exact_law(directory: Path, sampling: SamplingParams) -> list[float]:
    """The probability of every text, in the order of its tokens."""
    logits = logits_behind(directory)
    law = {(): 1.0}
    for _ in range(NEW_TOKENS):
        longer = {}
        for text, probability in law.items():
            row = adjusted(logits[text], PROMPT, text, sampling)
            following = filtered_distribution(
                row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
            )
            for token, share in enumerate(following):
                longer[(*text, token)] = probability * share
        law = longer
    return list(law.values())


def p_value_of_texts(
    directory: Path,
    verify: Verify,
    proposer: type,
    law: str,
    num_requests: int = REQUESTS,
    policy: SpeculationPolicy | None = None,
) -> float:
    """Test texts against their law; slots are given at random if no policy is named."""
    policy = policy or RandomSlots(random.Random(3))
    setup = Setup(policy, lambda _: {"ngram": proposer()}, max_num_seqs=128, num_blocks=BLOCKS)
    settings = {"max_tokens": NEW_TOKENS, **LAWS[law]}
    requests = [request(str(i), PROMPT, policy, seed=i, **settings) for i in range(num_requests)]
    outcome = run(Model(directory, verify=verify), requests, setup)
    assert min(outcome.accepted, outcome.rejected) > num_requests // 5
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=NEW_TOKENS), 0)
    for tokens in outcome.tokens.values():
        counts[tuple(tokens)] += 1
    return p_value(list(counts.values()), exact_law(directory, requests[0].sampling))


@pytest.mark.parametrize(
    ("verify", "proposer", "law"),
    [
        *(("rejection", DrawnDrafts, law) for law in LAWS),
        ("rejection", CertainDrafts, "top-k, top-p"),
        ("rejection", CertainDrafts, "penalties"),
        ("coupled", DrawnDrafts, "penalties"),
    ],
)
def test_texts_have_the_law_of_the_model(
    checkpoint: Path, verify: Verify, proposer: type, law: str
) -> None:
    """Four tokens drafted, verified and batched in any way have the exact joint probabilities."""
    assert p_value_of_texts(checkpoint, verify, proposer, law) > ALPHA


@pytest.mark.long
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("proposer", [DrawnDrafts, CertainDrafts])
@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_many_texts_have_the_law_of_the_model(
    checkpoint: Path, verify: Verify, proposer: type, law: str
) -> None:
    """40 000 texts of every kind have the exact joint probabilities."""
    assert p_value_of_texts(checkpoint, verify, proposer, law, MANY_REQUESTS) > ALPHA


@pytest.fixture
def certain_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs stay as they are, so that what `auto` takes does not depend on the machine."""
    monkeypatch.setattr(StepCostFit, "observe", lambda *_: None)


@pytest.mark.usefixtures("certain_costs")
@pytest.mark.parametrize("proposer", [DrawnDrafts, CertainDrafts])
def test_rejection_has_the_law_of_the_model_under_auto(checkpoint: Path, proposer: type) -> None:
    """What the production allocator verifies, ranked among 128 sequences at a price that leaves
    out some slots and takes others, says nothing about the tokens that were drawn."""
    auto = speculation_policy("auto")
    assert p_value_of_texts(checkpoint, "rejection", proposer, "penalties", policy=auto) > ALPHA


def looks_at_the_token(
    scores: DraftScores, sequence: Sequence, source: str, draft: Draft
) -> tuple[Draft, tuple[float, ...]]:
    """Wrong: tokens that were drawn although they were unlikely are not worth a slot."""
    drawn = [
        float(row[token]) for row, token in zip(draft.distributions, draft.token_ids, strict=True)
    ]
    return draft, tuple(itertools.accumulate([float(share > 0.3) for share in drawn], min))


@pytest.mark.usefixtures("certain_costs")
def test_ranking_slots_by_their_own_tokens_changes_the_law(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails where evidence is the sampled token's own probability."""
    monkeypatch.setattr(DraftScores, "found", looks_at_the_token)
    auto, law = speculation_policy("auto"), "penalties"
    p = p_value_of_texts(checkpoint, "rejection", DrawnDrafts, law, policy=auto)
    assert p < ALPHA / 10


def test_without_noise_or_drafts_rejection_gives_the_coupled_text(checkpoint: Path) -> None:
    """In one batch with drawn drafts, greedy texts are the same either way; undrafted ones too."""

    def asked(policy: SpeculationPolicy) -> list[GenerationRequest]:
        settings = [{"temperature": i % 2, "seed": i, "max_tokens": 12} for i in range(12)]
        return [request(str(i), PROMPT, policy, **s) for i, s in enumerate(settings)]

    policy, rejecting = speculation_policy("fixed:4"), Model(checkpoint, verify="rejection")
    coupled = run(Model(checkpoint), asked(Off()), Setup()).tokens
    assert run(rejecting, asked(Off()), Setup()).tokens == coupled
    drafted = run(rejecting, asked(policy), Setup(policy, lambda _: {"ngram": DrawnDrafts()}))
    assert drafted.accepted > 0
    greedy = {(one.request_id, 0) for one in asked(policy) if one.sampling.temperature == 0}
    assert greedy <= {key for key, tokens in drafted.tokens.items() if tokens == coupled[key]}


def residual_from_p(p: torch.Tensor, rows: RowSampling, q: torch.Tensor) -> torch.Tensor:
    """Wrong: the token behind a refusal is drawn from p, not from the residual."""
    return DRAW_RESIDUAL(p, rows, torch.zeros_like(q))


def accept_at_p(
    p: torch.Tensor, rows: RowSampling, drafts: torch.Tensor, q: torch.Tensor
) -> torch.Tensor:
    """Wrong: drawn drafts are accepted as if they had not been drawn."""
    return ACCEPTS(p, rows, drafts, torch.ones_like(q))


DRAW_RESIDUAL, ACCEPTS = rejection_ref._draw_residual, rejection_ref._accepts


@pytest.mark.parametrize(
    ("rule", "wrong"), [("_draw_residual", residual_from_p), ("_accepts", accept_at_p)]
)
def test_a_wrong_rule_changes_the_law_of_texts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rule: str, wrong: object
) -> None:
    """The test above fails, by far, when a rule of rejection is broken."""
    monkeypatch.setattr(rejection_ref, rule, wrong)
    law = "top-k, top-p"
    assert p_value_of_texts(checkpoint, "rejection", DrawnDrafts, law) < ALPHA / 1000
