"""The joint distribution of several tokens under the production scheduler.

A random model of five tokens generates four tokens, so every text has a known probability.
Thousands of requests with different seeds share batches with random draft slots. Chi-square tests
with fixed seeds compare the counts of the texts with the distribution.
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

SAMPLINGS = {
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
    """Save a random Llama with five tokens, whose next token depends on all previous tokens."""
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


class LookupProposer:
    """A base class for proposers without cost."""

    def depth_s(self, sequences: int) -> float:
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        return [self.draft(request.sequence, request.max_tokens) for request in requests]

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        raise NotImplementedError

    def forget(self, sequence: Sequence) -> None: ...


class SampledDrafts(LookupProposer):
    """A proposer that samples from its own distributions with the output noise, as a draft model
    does."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        logits = torch.randn(VOCAB, VOCAB, generator=generator)
        logits[1, 2] = -torch.inf  # a likely token under p may be impossible under q
        self._distributions = logits.softmax(dim=1)
        self._scores = self._distributions.log().tolist()

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        drafts, distributions = [], []
        last = sequence.token_ids[-1]
        for position in range(len(sequence.token_ids), len(sequence.token_ids) + max_tokens):
            distributions.append(self._distributions[last])
            gumbel = output_noise(sequence.request.sampling.seed)[position]
            scores = [s + g for s, g in zip(self._scores[last], gumbel, strict=True)]
            last = scores.index(max(scores))
            drafts.append(last)
        return Draft(tuple(drafts), distributions=torch.stack(distributions))


class FixedDrafts(LookupProposer):
    """A proposer of likely tokens, and of unlikely tokens after the tokens 1 and 4."""

    FOLLOWS = (3, 0, 3, 0, 1)

    def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        last, drafts = sequence.token_ids[-1], []
        for _ in range(max_tokens):
            last = self.FOLLOWS[last]
            drafts.append(last)
        return Draft(tuple(drafts))


@cache
def output_noise(seed: int) -> list[list[float]]:
    """Return the noise of a seed's output tokens by position."""
    positions = torch.arange(MOST_TOKENS)
    seeds = torch.full_like(positions, seed)
    zeros = torch.zeros_like(positions)
    return noise.gumbel(seeds, zeros, positions, noise.PURPOSE_OUTPUT, VOCAB).tolist()


class Table:
    """A stand-in for a sequence that has only a block table."""

    block_table = (0,)
    adapter_slot = 0


@cache
def logits_after(directory: Path) -> dict[tuple[int, ...], list[float]]:
    """Return the logits of the model after every prefix of a text."""
    runner = Model(directory).runner(BLOCKS)
    found = {}
    for text in itertools.product(range(VOCAB), repeat=NEW_TOKENS - 1):
        plan = StepPlan((SequenceWork(Table(), 0, PROMPT, True, Draft(text)),))
        for length, row in enumerate(runner.logits(plan).tolist()):
            found[text[:length]] = row
    return found


def exact_distribution(directory: Path, sampling: SamplingParams) -> list[float]:
    """Return the probability of every text in lexicographic order."""
    logits = logits_after(directory)
    distribution = {(): 1.0}
    for _ in range(NEW_TOKENS):
        longer = {}
        for text, probability in distribution.items():
            row = adjusted(logits[text], PROMPT, text, sampling)
            following = filtered_distribution(
                row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
            )
            for token, share in enumerate(following):
                longer[(*text, token)] = probability * share
        distribution = longer
    return list(distribution.values())


def p_value_of_texts(
    directory: Path,
    verify: Verify,
    proposer: type,
    name: str,
    num_requests: int = REQUESTS,
    policy: SpeculationPolicy | None = None,
) -> float:
    """Test sampled texts against their distribution, with random slots unless a policy is given."""
    policy = policy or RandomSlots(random.Random(3))
    setup = Setup(policy, lambda _: {"ngram": proposer()}, max_num_seqs=128, num_blocks=BLOCKS)
    settings = {"max_tokens": NEW_TOKENS, **SAMPLINGS[name]}
    requests = [request(str(i), PROMPT, policy, seed=i, **settings) for i in range(num_requests)]
    outcome = run(Model(directory, verify=verify), requests, setup)
    assert min(outcome.accepted, outcome.rejected) > num_requests // 5
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=NEW_TOKENS), 0)
    for tokens in outcome.tokens.values():
        counts[tuple(tokens)] += 1
    return p_value(list(counts.values()), exact_distribution(directory, requests[0].sampling))


@pytest.mark.parametrize(
    ("verify", "proposer", "name"),
    [
        ("rejection", SampledDrafts, "min-p"),
        ("rejection", FixedDrafts, "top-k, top-p"),
        ("coupled", SampledDrafts, "penalties"),
    ],
)
def test_texts_have_the_distribution_of_the_model(
    checkpoint: Path, verify: Verify, proposer: type, name: str
) -> None:
    """Texts of four tokens have the model's exact joint distribution for any drafts, verification
    and batching."""
    assert p_value_of_texts(checkpoint, verify, proposer, name) > ALPHA


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("proposer", [SampledDrafts, FixedDrafts])
@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_many_texts_have_the_distribution_of_the_model(
    checkpoint: Path, verify: Verify, proposer: type, name: str
) -> None:
    """40,000 texts of every kind have the model's exact joint distribution."""
    assert p_value_of_texts(checkpoint, verify, proposer, name, MANY_REQUESTS) > ALPHA


@pytest.fixture
def fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep costs fixed, so that the decisions of `auto` do not depend on the machine."""
    monkeypatch.setattr(StepCostFit, "add_step", lambda *_: None)


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize(
    "proposer", [SampledDrafts, pytest.param(FixedDrafts, marks=pytest.mark.long)]
)
def test_rejection_keeps_the_distribution_under_auto(checkpoint: Path, proposer: type) -> None:
    """Texts keep their distribution when `auto` chooses the slots of 128 sequences."""
    auto = speculation_policy("auto")
    assert p_value_of_texts(checkpoint, "rejection", proposer, "penalties", policy=auto) > ALPHA


def rank_by_sampled_token(
    scores: DraftScores, sequence: Sequence, source: str, draft: Draft
) -> tuple[Draft, tuple[float, ...]]:
    """Give no slot to unlikely sampled tokens, which is wrong."""
    drawn = [
        float(row[token]) for row, token in zip(draft.distributions, draft.token_ids, strict=True)
    ]
    return draft, tuple(itertools.accumulate([float(share > 0.3) for share in drawn], min))


@pytest.mark.long
@pytest.mark.usefixtures("fixed_costs")
def test_ranking_slots_by_their_sampled_tokens_changes_the_distribution(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test detects a policy whose evidence depends on the sampled token."""
    monkeypatch.setattr(DraftScores, "found", rank_by_sampled_token)
    auto, name = speculation_policy("auto"), "penalties"
    p = p_value_of_texts(checkpoint, "rejection", SampledDrafts, name, policy=auto)
    assert p < ALPHA / 10


def test_without_noise_or_drafts_rejection_gives_the_coupled_text(checkpoint: Path) -> None:
    """Both kinds of verification give the same text if the request is greedy or has no drafts."""

    def requests(policy: SpeculationPolicy) -> list[GenerationRequest]:
        settings = [{"temperature": i % 2, "seed": i, "max_tokens": 12} for i in range(12)]
        return [request(str(i), PROMPT, policy, **s) for i, s in enumerate(settings)]

    policy, rejecting = speculation_policy("fixed:4"), Model(checkpoint, verify="rejection")
    coupled = run(Model(checkpoint), requests(Off()), Setup()).tokens
    assert run(rejecting, requests(Off()), Setup()).tokens == coupled
    drafted = run(rejecting, requests(policy), Setup(policy, lambda _: {"ngram": SampledDrafts()}))
    assert drafted.accepted > 0
    greedy = {(each.request_id, 0) for each in requests(policy) if each.sampling.temperature == 0}
    assert greedy <= {key for key, tokens in drafted.tokens.items() if tokens == coupled[key]}


def residual_from_p(p: torch.Tensor, rows: RowSampling, q: torch.Tensor) -> torch.Tensor:
    """Draw from p instead of the residual after a rejection, which is wrong."""
    return DRAW_RESIDUAL(p, rows, torch.zeros_like(q))


def accept_at_p(
    p: torch.Tensor, rows: RowSampling, drafts: torch.Tensor, q: torch.Tensor
) -> torch.Tensor:
    """Accept sampled drafts as if they were fixed, which is wrong."""
    return ACCEPTS(p, rows, drafts, torch.ones_like(q))


DRAW_RESIDUAL, ACCEPTS = rejection_ref._draw_residual, rejection_ref._accepts


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("_draw_residual", residual_from_p),
        pytest.param("_accepts", accept_at_p, marks=pytest.mark.long),
    ],
)
def test_wrong_rejection_rule_changes_the_distribution(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rule: str, wrong: object
) -> None:
    """The test detects a wrong rejection rule by a wide margin."""
    monkeypatch.setattr(rejection_ref, rule, wrong)
    name = "top-k, top-p"
    assert p_value_of_texts(checkpoint, "rejection", SampledDrafts, name) < ALPHA / 1000
