"""Drafts, batches and memory change no token of a mixture of experts or of Gemma."""

from __future__ import annotations

import random

import pytest

from draftgate.backends.core.proposer import Proposer
from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.proposers.sparse_self import SparseSelfProposer
from draftgate.backends.engine.rope import Rope
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import Weights
from draftgate.backends.types import GenerationRequest
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import SpeculationMode
from tests.engine.harness import (
    COST,
    HostileProposer,
    Outcome,
    RandomSlots,
    Setup,
    embedding_request,
    request,
)
from tests.engine.tiny_model import (
    POSITIONS,
    TINY_EXPERTS,
    VOCAB,
    TinyEngine,
    tiny_config,
    tiny_weights,
    tokens_of,
)

# Widths that the operators in C support.
SHAPE = {"hidden_size": 48, "intermediate_size": 64}
MODELS = {
    "mixture of experts": {"experts": TINY_EXPERTS, **SHAPE},
    "Gemma": {
        "activation": "gelu",
        "sandwich_norms": True,
        "embedding_scale": 48**0.5,
        "query_scalar": 24.0,
        "attention_softcap": 2.0,
        "logit_softcap": 5.0,
        "windows": (20, None),
        "layer_ropes": (Rope(500.0), Rope(1e4)),
        "rope": Rope(1e4),
        **SHAPE,
    },
}
MODES = (SpeculationMode.NGRAM, SpeculationMode.SPARSE_SELF, SpeculationMode.OFF)
NEW_TOKENS = 40


def proposers(engine: TinyEngine) -> dict[str, Proposer]:
    sparse = SparseSelfProposer(
        engine.runner.forward,
        budget_tokens=48,
        sink_tokens=16,
        eos_ids=frozenset({0}),
        keep_distributions=False,
        cost=COST,
    )
    return {"ngram": NgramProposer(), "sparse_self": sparse}


def hostile_proposers(engine: TinyEngine) -> dict[str, Proposer]:
    return proposers(engine) | {"ngram": HostileProposer(VOCAB, random.Random(6))}


def run(config: ModelConfig, weights: Weights, setup: Setup) -> Outcome:
    """Run greedy and sampled requests and an embedding with the policy of the setup."""
    pool = KvPool(config, setup.num_blocks, weights.embedding.dtype)
    runner = Runner(Decoder(config, weights, POSITIONS), pool)
    return TinyEngine(config, runner, setup).run(requests(setup.policy))


def requests(policy: SpeculationPolicy) -> list[GenerationRequest]:
    generated = [
        request(
            str(index),
            tokens_of(10 + 13 * index, seed=index) * 2,
            policy,
            mode=MODES[index % 3],
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=NEW_TOKENS,
        )
        for index in range(6)
    ]
    return [*generated, embedding_request("embedded", tokens_of(50, seed=9))]


@pytest.mark.parametrize("model", MODELS)
def test_tokens_do_not_depend_on_drafts_batches_or_memory(model: str) -> None:
    """Each request alone without drafts, and all requests in a batch with right and wrong drafts,
    split prompts and preemptions generate the same tokens and the same embedding."""
    config = tiny_config(**MODELS[model])
    weights = tiny_weights(config)
    expected = run(config, weights, Setup(Off(), max_num_seqs=1, num_blocks=64))
    accepted = rejected = preemptions = 0
    for setup in (
        Setup(speculation_policy("fixed:4"), proposers, max_step_tokens=24, num_blocks=48),
        Setup(RandomSlots(random.Random(5)), hostile_proposers, max_step_tokens=64, num_blocks=24),
    ):
        outcome = run(config, weights, setup)
        assert outcome.tokens == expected.tokens
        assert outcome.embeddings == expected.embeddings
        assert outcome.leaked_blocks == 0
        accepted += outcome.accepted
        rejected += outcome.rejected
        preemptions += outcome.preemptions
    assert accepted > 30
    assert rejected > 30
    assert preemptions > 0
