"""All built-in proposers on the shipped model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import torch

from draftgate.backends.checkpoints import SHIPPED_DRAFT, SHIPPED_DRAFT_WINDOW
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.registry import ProposerSetup, make_proposers
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import SpeculationMode
from tests.engine.harness import COST, MAX_MODEL_LEN, Engine, HostileProposer, Model, Setup
from tests.engine.mixed_batches import Batching, at_random, check_lossless

MODES = (
    SpeculationMode.NGRAM,
    SpeculationMode.DRAFT_MODEL,
    SpeculationMode.SPARSE_SELF,
    SpeculationMode.OFF,
)


def mode_of(index: int) -> SpeculationMode:
    """Return the speculation mode for this request index, so that a batch has all modes."""
    return MODES[index % len(MODES)]


@cache
def shipped_draft(dtype: torch.dtype, window: int | None = SHIPPED_DRAFT_WINDOW) -> Decoder:
    """Load the shipped draft model with a window of `window` tokens."""
    config = read_model_config(SHIPPED_DRAFT)
    config = replace(config, windows=(window,) * config.num_layers)
    return Decoder(config, load_weights(SHIPPED_DRAFT, config, dtype), MAX_MODEL_LEN)


def every_proposer(engine: Engine, **settings: object) -> dict[str, Proposer]:
    """Create all proposers, with a small budget that makes some sparse drafts wrong."""
    config = WorkerConfig(
        verify=engine.model.verify,
        **{"sparse_budget_tokens": 48, "max_step_tokens": 64, "max_num_seqs": 16, **settings},
    )
    draft = shipped_draft(engine.model.dtype)
    decoder, pool, blocks = engine.model.decoder, engine.pool, engine.blocks
    forward = engine.runner.forward
    return make_proposers(ProposerSetup(config, decoder, pool, blocks, forward, COST, draft))


def every_proposer_and_a_hostile_one(engine: Engine) -> dict[str, Proposer]:
    """Create all proposers, with a hostile proposer in place of n-gram."""
    hostile = HostileProposer(engine.model.config.vocab_size, random.Random(6))
    return every_proposer(engine) | {"ngram": hostile}


def check_shipped_proposers(model: Model, batchings: Iterable[Batching]) -> None:
    """Check that random drafts of all proposers leave the text of `off`."""
    check_lossless(
        model,
        MODES,
        at_random(batchings),
        lambda policy, batching: Engine(
            model, Setup(policy, every_proposer_and_a_hostile_one, **batching)
        ),
        num_prompts=6,
    )
