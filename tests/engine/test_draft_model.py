"""The draft model, which keeps its keys and values in memory borrowed from the target."""

from __future__ import annotations

import json
import random
import shutil
from itertools import count
from pathlib import Path

import pytest
import torch

from bench.harness.prompts import held_out_prompts
from draftgate.backends.checkpoints import SHIPPED_DRAFT, SHIPPED_MODEL
from draftgate.backends.core.draft_pages import DraftPages
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.proposers.draft_model import DraftModel, DraftModelProposer
from draftgate.backends.errors import CheckpointError
from draftgate.backends.types import ResumedChoice
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import SpeculationMode
from tests.engine.harness import Model, Setup, request, run
from tests.engine.shipped_proposers import every_proposer, shipped_draft

COST = StepCost((1, 8), (1e-3, 2e-3))


class Drafter:
    """A draft model proposer with its own pool."""

    def __init__(
        self,
        model: Model,
        num_blocks: int = 64,
        catch_up_tokens: int = 512,
        window: int | None = None,
    ) -> None:
        self.pool = KvPool(model.config, num_blocks, model.dtype)
        self.blocks = KvBlocks(num_blocks, BLOCK_TOKENS)
        draft = shipped_draft(model.dtype, window)
        kv = self.pool.draft_layers(draft.config)
        self.pages = DraftPages(self.blocks, kv.groups, kv.page_tokens, kv.group_pages)
        self.proposer = DraftModelProposer(
            DraftModel(draft, kv, model.config.vocab_size),
            self.pages,
            eos_ids=model.config.eos_ids,
            keep_distributions=False,
            catch_up_tokens=catch_up_tokens,
            cost=COST,
        )

    def draft(self, sequence: Sequence, tokens: int = 4) -> tuple[int, ...]:
        (draft,) = self.proposer.propose([DraftRequest(sequence, tokens)])
        return draft.token_ids


def sequence_of(model: Model, index: int = 0, tokens: int = 60, key: int = 0) -> Sequence:
    ids = held_out_prompts(model.tokenizer, index + 1, least=tokens, most=tokens)[index]
    wanted = request(str(key), ids, Off(), temperature=0.8, seed=7)
    return Sequence.for_choice(key, wanted, ResumedChoice(0, ()))


def test_draft_does_not_depend_on_earlier_drafts(shipped: Model) -> None:
    """After correct and wrong drafts, pauses and lost pages, a proposer drafts the same tokens as a
    new proposer."""
    rng, drafter, sequence = random.Random(0), Drafter(shipped), sequence_of(shipped)
    for _ in range(30):
        unknown = sequence_of(shipped)
        unknown.token_ids[:] = sequence.token_ids
        drafted = drafter.draft(sequence)
        assert drafted == Drafter(shipped).draft(unknown)
        assert sequence.draft_table.valid_tokens == len(sequence.token_ids)
        accepted = rng.randint(0, len(drafted))
        sequence.token_ids.extend((*drafted[:accepted], rng.randrange(4096)))
        if rng.random() < 0.2:
            sequence.token_ids.extend(rng.randrange(4096) for _ in range(rng.randint(1, 40)))
        if rng.random() < 0.2:
            drafter.pages.give_back(rng.randint(1, 8))


def test_batched_drafts_equal_drafts_alone(shipped: Model) -> None:
    """Each sequence gets the same draft in a batch and alone, even if pages of sequences are
    interleaved."""
    drafter_of_batch = Drafter(shipped)
    sequences = [sequence_of(shipped, i, 30 + 17 * i, key=i) for i in range(5)]
    for round_number in range(4):
        requests = [DraftRequest(s, 1 + (s.key + round_number) % 4) for s in sequences]
        drafts = drafter_of_batch.proposer.propose(requests)
        for wanted, draft in zip(requests, drafts, strict=True):
            alone = sequence_of(shipped, wanted.sequence.key, 30 + 17 * wanted.sequence.key)
            alone.token_ids[:] = wanted.sequence.token_ids
            assert draft.token_ids == Drafter(shipped).draft(alone, wanted.max_tokens)
            wanted.sequence.token_ids.extend((*draft.token_ids[:2], 5))


def test_missing_tokens_are_computed_in_bounded_steps(shipped: Model) -> None:
    """The proposer computes missing tokens in steps of bounded size, and the draft stays the
    same."""
    sequence = sequence_of(shipped, tokens=200)
    drafter = Drafter(shipped, catch_up_tokens=64)
    computed = []
    forward = drafter.proposer._model.forward

    def counting(feeds):
        computed[-1] += sum(len(feed.token_ids) for feed in feeds)
        return forward(feeds)

    drafter.proposer._model.forward = counting
    drafted = ()
    while not drafted:
        computed.append(0)
        drafted = drafter.draft(sequence, 1)
    assert computed == [64, 64, 64, 8]
    assert drafted == Drafter(shipped).draft(sequence_of(shipped, tokens=200), 1)


def test_tokens_out_of_reach_are_not_computed(shipped: Model) -> None:
    """A draft model with a window computes only tokens within its window, and drafts stay the
    same."""

    def drafts(reach_tokens: int | None) -> list[tuple[int, ...]]:
        drafter = Drafter(shipped, window=24)
        drafter.pool.memory.normal_(
            generator=torch.Generator().manual_seed(0)
        )  # uninitialized memory
        assert drafter.proposer._model.reach_tokens == 48
        drafter.proposer._model.reach_tokens = reach_tokens
        found = []
        for index in range(6):
            sequence = sequence_of(shipped, index, tokens=200, key=index)
            missing = 199 - drafter.proposer._valid_tokens(sequence)
            assert missing == (199 if reach_tokens is None else reach_tokens)
            found.append(drafter.draft(sequence))
        return found

    assert drafts(48) == drafts(None)
    assert drafts(8) != drafts(None)


def test_no_draft_without_free_memory(shipped: Model) -> None:
    """The proposer takes no blocks of the target and resumes drafting when a block is free."""
    drafter, table = Drafter(shipped, num_blocks=8), []
    drafter.blocks.extend(table, 8 * BLOCK_TOKENS)
    sequence = sequence_of(shipped)
    assert drafter.draft(sequence) == ()
    drafter.blocks.release(table)
    assert len(drafter.draft(sequence)) == 4
    drafter.blocks.extend(table, 8 * BLOCK_TOKENS)
    assert (sequence.draft_table.pages, sequence.draft_table.valid_tokens) == ([], 0)
    drafter.proposer.forget(sequence)
    drafter.proposer.forget(sequence)
    drafter.blocks.release(table)
    assert drafter.blocks.num_free == 8


def test_forgetting_frees_the_pages(shipped: Model) -> None:
    """The proposer keeps neither pages nor state of a finished sequence."""
    drafter, sequence = Drafter(shipped), sequence_of(shipped)
    drafter.draft(sequence)
    drafter.proposer.forget(sequence)
    assert drafter.blocks.num_free == 64
    drafter.blocks.check_integrity([])
    assert not drafter.proposer._drafted


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.45), (0.8, 0.4)])
def test_shipped_draft_model_agrees_with_its_target(
    shipped: Model, temperature: float, least: float
) -> None:
    """The target accepts many more drafts on held-out code than by chance. The 66% in the model
    card are per position with teacher forcing. Fewer tokens survive in a chain of four."""
    policy = speculation_policy("fixed:4")
    prompts = held_out_prompts(shipped.tokenizer, 12)
    requests = [
        request(
            str(i), p, policy, mode=SpeculationMode.DRAFT_MODEL, temperature=temperature,
            seed=i, max_tokens=48,
        )
        for i, p in enumerate(prompts)
    ]  # fmt: skip
    outcome = run(shipped, requests, Setup(policy, every_proposer))
    assert outcome.accepted / (outcome.accepted + outcome.rejected) > least


def test_draft_model_of_another_vocabulary_is_rejected(tmp_path: Path) -> None:
    """The loader compares both tokenizers and rejects a draft model with another vocabulary."""
    other = Path(shutil.copytree(SHIPPED_DRAFT, tmp_path / "draft"))
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[1000:1002]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="vocabulary differs from the model's"):
        load_engine(WorkerConfig(device="cpu", draft_model=str(other)))


def test_draft_model_proposer_needs_a_draft_model() -> None:
    """The error names the option for a draft model."""
    config = WorkerConfig(device="cpu", model=str(SHIPPED_MODEL), proposer="draft_model")
    with pytest.raises(ValueError, match="--draft-model"):
        load_engine(config)


def test_logits_do_not_depend_on_the_places_of_pages(shipped: Model) -> None:
    """Logits have the same bits for scattered pages of several groups and for consecutive pages."""
    draft = shipped_draft(torch.float32)
    kv = KvPool(shipped.config, 16, torch.float32).draft_layers(draft.config)
    model = DraftModel(draft, kv, shipped.config.vocab_size)
    tokens = [*held_out_prompts(shipped.tokenizer, 1, least=100, most=100)[0]]
    every = [g * kv.group_pages + b for g in range(kv.groups) for b in range(16)]
    assert kv.groups > 1
    runs = every[:16]
    scattered = random.Random(2).sample(every, 16)
    bits = [model.forward([Feed(tokens, 0, pages, num_samples=1)]) for pages in (runs, scattered)]
    assert torch.equal(*bits)


def test_measured_drafting_updates_the_cost(shipped: Model, monkeypatch) -> None:
    """After drafts that take 3 ms per depth, the cost of a depth is 3 ms, whatever the startup
    measured."""
    ticks = count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) * 3e-3)
    drafter, sequence = Drafter(shipped), sequence_of(shipped)
    assert drafter.proposer.depth_s(1) == pytest.approx(1e-3)
    for _ in range(200):
        drafter.draft(sequence)
    assert drafter.proposer.depth_s(1) == pytest.approx(3e-3, rel=0.05)
