"""A worker whose target is tapped by an EAGLE-3 head, without threads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from draftgate.backends.core.draft_pages import DraftPages
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.eagle.config import check_target, read_head_config
from draftgate.backends.engine.eagle.head import EagleHead
from draftgate.backends.engine.eagle.weights import load_head_weights
from draftgate.backends.engine.inputs import Feed
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.engine.proposers.eagle import EagleProposer, HeadRunner
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.taps import Taps
from draftgate.backends.types import ResumedChoice
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.speculation.baselines import Off
from tests.engine.eagle_heads import ReferenceHead, repeating, write_head
from tests.engine.harness import COST, MAX_MODEL_LEN, Engine, Model, Setup, request
from tests.engine.mixed_batches import HEAD_MODES, Batching, check_lossless

BLOCKS = 96


def load_head(directory: Path, model: Model) -> EagleHead:
    config = read_head_config(directory)
    check_target(config, model.config, directory)
    weights = load_head_weights(directory, config, model.decoder._weights, model.dtype)
    return EagleHead(config, weights, MAX_MODEL_LEN)


class TappedEngine(Engine):
    """A worker whose steps store the features of a head."""

    def __init__(self, model: Model, setup: Setup, head: EagleHead) -> None:
        self.head = head
        super().__init__(model, setup)

    def new_pool(self, num_blocks: int) -> KvPool:
        pool = self.model.pool(num_blocks, self.head.features)
        self.model.decoder.taps = Taps(
            self.head.config.taps_of(self.model.config), self.head.fuse, pool
        )
        return pool


def eagle_proposer(engine: TappedEngine, **changes: Any) -> EagleProposer:
    kv = engine.pool.draft_layers(engine.head.config.model)
    settings = {
        "eos_ids": engine.model.config.eos_ids,
        "keep_distributions": engine.model.verify == "rejection",
        "catch_up_tokens": 64,
        "cost": COST,
        **changes,
    }
    pages = DraftPages(engine.blocks, kv.groups, kv.page_tokens, kv.group_pages)
    return EagleProposer(HeadRunner(engine.head, engine.pool, kv), pages, **settings)


def both(engine: TappedEngine) -> dict[str, Proposer]:
    """Return the proposers of n-grams and of the head."""
    return {"ngram": NgramProposer(), "eagle": eagle_proposer(engine)}


def check_head(
    model: Model,
    folder: Path,
    batches: Iterable[tuple[SpeculationPolicy, Batching]],
    num_prompts: int = 4,
) -> None:
    """Check that trees of n-gram drafts and of a head leave the text of `off`.

    Args:
        folder: where the head is written.
    """
    head = load_head(write_head(folder, repeating), model)
    try:
        check_lossless(
            model,
            HEAD_MODES,
            batches,
            lambda policy, batching: TappedEngine(model, Setup(policy, both, **batching), head),
            num_prompts,
        )
    finally:
        model.decoder.taps = None


def reference(directory: Path, model: Model, *, norm_first: bool = False) -> ReferenceHead:
    tensors = load_file(directory / "model.safetensors")
    return ReferenceHead(tensors, model.decoder._weights.embedding, norm_first)


def computed_sequence(engine: TappedEngine, token_ids: list[int], chunk: int = 40) -> Sequence:
    """Return a sequence whose tokens the target has computed in chunks, all but the last."""
    wanted = request("0", token_ids, Off(), temperature=0.0)
    sequence = Sequence.for_choice(0, wanted, ResumedChoice(0, ()))
    engine.blocks.extend(sequence.block_table, len(token_ids) + 16)
    for start in range(0, len(token_ids) - 1, chunk):
        fed = token_ids[start : min(start + chunk, len(token_ids) - 1)]
        engine.runner.forward([Feed(fed, start, sequence.block_table, num_samples=0)])
    sequence.num_computed = len(token_ids) - 1
    return sequence
