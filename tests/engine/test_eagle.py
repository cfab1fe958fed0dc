"""Drafts of EAGLE-3 heads: the arithmetic, the features of the target, and lossless texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.harness.prompts import held_out_prompts
from draftgate.backends.core.draft_growth import CHILDREN, Growth
from draftgate.backends.core.drafts import ROOT
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.eagle.head import NO_LOGIT, EagleHead
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.types import ResumedChoice
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import SpeculationMode
from tests.engine.eagle_engine import (
    BLOCKS,
    TappedEngine,
    both,
    check_head,
    computed_sequence,
    eagle_proposer,
    load_head,
    reference,
)
from tests.engine.eagle_heads import repeating, write_head
from tests.engine.harness import Model, Setup, request, run
from tests.engine.mixed_batches import (
    HEAD_MODES,
    mixed_requests,
    policy_named,
)

TAPS = (2, 3, 3)
"""The layers that EAGLE-3 taps of the six of the shipped model."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head with random weights."""
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.fixture
def tapped(shipped: Model) -> Iterator[Model]:
    """The shipped model, whose taps are removed after the test."""
    yield shipped
    shipped.decoder.taps = None


def hidden_states(model: Model, token_ids: list[int]) -> list[Tensor]:
    """Return the input of each layer and the output of the last one, [tokens, hidden_size] each,
    computed by transformers."""
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    last: list[Tensor] = []
    llama.model.norm.register_forward_pre_hook(lambda _, arguments: last.append(arguments[0]))
    with torch.no_grad():
        states = llama.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return [state[0] for state in (*states[:-1], last[0])]


@pytest.mark.parametrize("norm_first", [False, True])
def test_drafts_have_the_logits_of_the_published_arithmetic(
    tapped: Model, tmp_path: Path, norm_first: bool
) -> None:
    """Features of chunked prompts, the rows of confirmed tokens, and three drafts agree with plain
    torch to 1e-4."""

    def change(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        config["norm_before_residual"] = norm_first

    directory = write_head(tmp_path, change)
    engine = TappedEngine(tapped, Setup(num_blocks=BLOCKS), load_head(directory, tapped))
    found: list[Tensor] = []
    keep_logits(engine.head, found)
    token_ids = list(held_out_prompts(tapped.tokenizer, 1, least=70, most=70)[0])
    sequence = computed_sequence(engine, token_ids)
    (draft,) = eagle_proposer(engine, catch_up_tokens=512, trees=False).propose(
        [DraftRequest(sequence, 4)]
    )

    head = reference(directory, tapped, norm_first=norm_first)
    states = hidden_states(tapped, token_ids[:-1])
    features = head.features([states[layer] for layer in TAPS])
    slots = torch.arange(sequence.block_table[0] * 16, sequence.block_table[0] * 16 + 69)
    assert list(sequence.block_table) == list(range(len(sequence.block_table)))
    torch.testing.assert_close(engine.pool.read_features(slots), features, atol=1e-4, rtol=1e-4)
    fed = token_ids[1:]
    for logits, token in zip(found, draft.token_ids, strict=True):
        hidden, expected = head.rows(fed, features)
        own = head.token_ids()
        torch.testing.assert_close(logits[0, own], expected[-1], atol=1e-4, rtol=1e-4)
        assert token == own[expected[-1].argmax()]
        assert (logits[0] == NO_LOGIT).sum() == tapped.config.vocab_size - len(own)
        fed, features = [*fed, token], torch.cat([features, hidden[-1:]])


@pytest.mark.parametrize("window", [None, 24])
def test_trees_grow_from_the_published_arithmetic(
    tapped: Model, tmp_path: Path, window: int | None
) -> None:
    """A tree of 12 tokens has the branches that grow when each path is computed alone as a chain of
    confirmed rows and hidden states."""

    def peaked(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        repeating(config, tensors)
        tensors["lm_head.weight"] *= 2

    head = windowed(load_head(write_head(tmp_path, peaked), tapped), window)
    engine = TappedEngine(tapped, Setup(num_blocks=BLOCKS), head)
    token_ids = list(held_out_prompts(tapped.tokenizer, 1, least=70, most=70)[0])
    sequence = computed_sequence(engine, token_ids)
    (draft,) = eagle_proposer(engine, catch_up_tokens=512).propose([DraftRequest(sequence, 12)])

    plain = reference(tmp_path, tapped)
    plain.window = window
    states = hidden_states(tapped, token_ids[:-1])
    features = plain.features([states[layer] for layer in head.config.taps])

    def children(path: list[int]) -> list[tuple[int, float]]:
        rows = features
        for depth in range(len(path) + 1):
            hidden, logits = plain.rows([*token_ids[1:], *path[:depth]], rows)
            rows = torch.cat([rows, hidden[-1:]])
        best = torch.softmax(logits[-1], 0).topk(CHILDREN)
        tokens = plain.token_ids()[best.indices].tolist()
        return list(zip(tokens, best.values.tolist(), strict=True))

    growth = Growth(12)
    growth.add(ROOT, children([]))
    while unread := growth.next_unread():
        for node in unread:
            growth.add(node, children(growth.tokens(node)))
    assert growth.draft().token_ids == draft.token_ids
    assert growth.draft().parents == draft.parents
    assert draft.parents
    assert max(draft.depths) > 2


def windowed(head: EagleHead, window: int | None) -> EagleHead:
    head.config = replace(head.config, model=replace(head.config.model, windows=(window,)))
    return head


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_best_path_of_a_tree_begins_like_a_chain(
    tapped: Model, directory: Path, temperature: float
) -> None:
    """A tree of one token is the token that a chain samples with the noise of its position."""
    engine = TappedEngine(tapped, Setup(num_blocks=BLOCKS), load_head(directory, tapped))
    token_ids = list(held_out_prompts(tapped.tokenizer, 1, least=70, most=70)[0])
    sequence = computed_sequence(engine, token_ids)
    for seed in range(20):
        sequence.request = request("0", token_ids, Off(), temperature=temperature, seed=seed)
        found = [
            eagle_proposer(engine, catch_up_tokens=512, trees=trees).propose(
                [DraftRequest(sequence, 1)]
            )[0]
            for trees in (True, False)
        ]
        sequence.draft_table.pages.clear()
        assert found[0].token_ids == found[1].token_ids


def keep_logits(head: EagleHead, found: list[Tensor]) -> None:
    """Append the logits of every pass that samples to `found`."""
    forward = head.forward

    def keeping(*arguments: Any) -> Any:
        output = forward(*arguments)
        if len(output.logits):
            found.append(output.logits.clone())
        return output

    head.forward = keeping


class CheckedFeatures:
    """An EAGLE-3 proposer that compares every feature that it may read with a new computation."""

    def __init__(self, engine: TappedEngine) -> None:
        self.checked = 0
        self._inner = eagle_proposer(engine)
        self._engine = engine
        self.depth_s, self.catch_up_s = self._inner.depth_s, self._inner.catch_up_s
        self.forget = self._inner.forget

    def propose(self, requests: list[DraftRequest]) -> list[Any]:
        for wanted in requests:
            self._check(wanted.sequence)
        return self._inner.propose(requests)

    def _check(self, sequence: Sequence) -> None:
        model, head, taps = self._engine.model, self._engine.head, self._engine.model.decoder.taps
        alone = TappedEngine(model, Setup(num_blocks=48), head)
        expected = computed_sequence(alone, list(sequence.token_ids))
        model.decoder.taps = taps
        computed = sequence.num_computed
        found = self._engine.pool.read_features(slots_of(sequence, computed))
        assert torch.equal(found, alone.pool.read_features(slots_of(expected, computed)))
        self.checked += computed


def slots_of(sequence: Sequence, tokens: int) -> Tensor:
    table = torch.tensor(sequence.block_table)
    return (table[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()[:tokens]


BATCHINGS: dict[str, dict[str, int]] = {
    "fixed:3": {"max_num_seqs": 8, "max_step_tokens": 37},
    "random": {"max_num_seqs": 8, "max_step_tokens": 48, "num_blocks": 42},
    "auto": {"max_num_seqs": 4, "max_step_tokens": 128},
}
"""Policies with chunked prompts and, in small pools, preemptions."""


def test_drafts_do_not_change_a_token(tapped: Model, tmp_path: Path) -> None:
    """Greedy and sampled texts equal those of `off` in mixed batches with chunked prompts, shared
    prefixes, trees of n-gram and preemptions."""
    batches = [(policy_named(name), batching) for name, batching in BATCHINGS.items()]
    check_head(tapped, tmp_path, batches)


def test_features_of_all_computed_tokens_equal_a_new_computation(
    tapped: Model, tmp_path: Path
) -> None:
    """After chunks, cache hits, preemptions and accepted branches of trees, the feature of each
    token has the bits of a prefill."""
    head = load_head(write_head(tmp_path, repeating), tapped)
    checkers: list[CheckedFeatures] = []

    def proposers(engine: TappedEngine) -> dict[str, Proposer]:
        checkers.append(CheckedFeatures(engine))
        return {"ngram": NgramProposer(), "eagle": checkers[-1]}

    policy = policy_named("random")
    engine = TappedEngine(tapped, Setup(policy, proposers, **BATCHINGS["random"]), head)
    outcome = engine.run(mixed_requests(tapped, policy, HEAD_MODES))
    assert outcome.preemptions > 0
    assert outcome.cached_tokens > 0
    assert checkers[0].checked > 1000


def test_resumed_output_continues_the_same_text(tapped: Model, directory: Path) -> None:
    """A worker that takes over after 15 tokens generates the remaining tokens with drafts."""
    policy = speculation_policy("fixed:4")
    (prompt,) = held_out_prompts(tapped.tokenizer, 1)
    settings = {"temperature": 0.8, "seed": 5, "max_tokens": 40, "mode": SpeculationMode.EAGLE}
    expected = run(tapped, [request("a", prompt, Off(), **settings)], Setup()).tokens["a", 0]
    head = load_head(directory, tapped)
    resumed = (ResumedChoice(0, tuple(expected[:15])),)
    engine = TappedEngine(tapped, Setup(policy, both), head)
    outcome = engine.run([request("a", prompt, policy, resumed=resumed, **settings)])
    assert outcome.tokens["a", 0] == expected[15:]
    assert outcome.rejected > 0


def test_window_bounds_the_rows_that_a_draft_needs(tapped: Model, directory: Path) -> None:
    """A head with a window of 24 computes no row out of its reach, and drafts as if it had."""
    drafts, rows = [], []
    for reach in (24, None):
        head = windowed(load_head(directory, tapped), 24)
        engine = TappedEngine(tapped, Setup(num_blocks=BLOCKS), head)
        proposer = eagle_proposer(engine, catch_up_tokens=512)
        proposer._runner.reach_tokens = reach
        token_ids = list(held_out_prompts(tapped.tokenizer, 1, least=200, most=200)[0])
        sequence = computed_sequence(engine, token_ids)
        rows.append(199 - proposer._first_missing(sequence))
        drafts += proposer.propose([DraftRequest(sequence, 3)])
    assert drafts[0].token_ids == drafts[1].token_ids
    assert rows == [25, 199]


def test_missing_rows_are_computed_in_bounded_steps(tapped: Model, directory: Path) -> None:
    """The proposer computes 64 rows per call and then drafts as if it had computed all at once."""
    head = load_head(directory, tapped)
    token_ids = list(held_out_prompts(tapped.tokenizer, 1, least=150, most=150)[0])
    drafts = []
    for most in (64, 512):
        engine = TappedEngine(tapped, Setup(num_blocks=BLOCKS), head)
        proposer = eagle_proposer(engine, catch_up_tokens=most)
        sequence = computed_sequence(engine, token_ids)
        calls = [proposer.propose([DraftRequest(sequence, 3)])[0].token_ids for _ in range(3)]
        drafts.append([call for call in calls if call])
    assert [len(calls) for calls in drafts] == [1, 3]
    assert {call for calls in drafts for call in calls} == {drafts[0][0]}


def test_sampled_drafts_have_distributions_for_rejection(tapped: Model, directory: Path) -> None:
    """With rejection, a draft has distributions over the target's vocabulary without other mass."""
    engine = TappedEngine(tapped, Setup(num_blocks=BLOCKS), load_head(directory, tapped))
    proposer = eagle_proposer(engine, catch_up_tokens=512, keep_distributions=True)
    token_ids = list(held_out_prompts(tapped.tokenizer, 1, least=70, most=70)[0])
    sequence = computed_sequence(engine, token_ids)
    sequence.request = request("0", token_ids, Off(), temperature=0.7, seed=3)
    (draft,) = proposer.propose([DraftRequest(sequence, 3)])
    assert draft.distributions.shape == (3, tapped.config.vocab_size)
    torch.testing.assert_close(draft.distributions.sum(1), torch.ones(3))
    others = torch.ones(tapped.config.vocab_size, dtype=torch.bool)
    others[reference(directory, tapped).token_ids()] = False
    assert draft.distributions[:, others].max() == 0
    assert all(draft.distributions[i, token] > 0 for i, token in enumerate(draft.token_ids))


def test_no_draft_without_features_or_memory(tapped: Model, directory: Path) -> None:
    """A sequence with more than one pending token gets no draft, nor does one without memory."""
    engine = TappedEngine(tapped, Setup(num_blocks=12), load_head(directory, tapped))
    proposer = eagle_proposer(engine)
    token_ids = list(held_out_prompts(tapped.tokenizer, 1, least=60, most=60)[0])
    sequence = computed_sequence(engine, token_ids)
    sequence.num_computed = 40
    assert not proposer.propose([DraftRequest(sequence, 3)])[0]
    assert sequence.draft_table.valid_tokens == 40
    sequence.num_computed = 59
    assert len(proposer.propose([DraftRequest(sequence, 3)])[0]) == 3
    table: list[int] = []
    engine.blocks.extend(table, 16 * (12 - len(sequence.block_table)))
    assert sequence.draft_table.pages == []
    assert not proposer.propose([DraftRequest(sequence, 3)])[0]
    engine.blocks.release(table)
    assert len(proposer.propose([DraftRequest(sequence, 3)])[0]) == 3
    proposer.forget(sequence)
    assert engine.blocks.num_free == 12 - len(sequence.block_table)
