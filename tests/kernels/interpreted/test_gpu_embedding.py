"""Embeddings on the GPU runner in the interpreter, compared with the CPU runner."""

from __future__ import annotations

import random

import numpy as np
import pytest

from draftgate.policies.registry import speculation_policy
from tests.engine.harness import HostileProposer, Outcome, Setup, embedding_request, request
from tests.engine.tiny_model import VOCAB, cpu_engine, gpu_engine, tiny_config, tiny_weights

# test_gpu_runner.py tests two layers.
ONE_LAYER = {"num_layers": 1, "windows": (None,), "num_heads": 2, "num_kv_heads": 1}


def assert_close(found: Outcome, expected: Outcome) -> None:
    """Check that both runs embed the same texts, with hidden states equal up to rounding."""
    assert found.leaked_blocks == expected.leaked_blocks == 0
    assert found.embeddings.keys() == expected.embeddings.keys()
    for name, embedding in expected.embeddings.items():
        state = np.frombuffer(found.embeddings[name], "<f4")
        np.testing.assert_allclose(state, np.frombuffer(embedding, "<f4"), atol=1e-4)


@pytest.mark.parametrize("policy", [pytest.param("off", marks=pytest.mark.long), "fixed:3"])
def test_prompts_are_embedded_in_steps_with_decodes_and_drafts(policy: str) -> None:
    """Chunked embeddings in overlapped steps and beside trees leave other tokens unchanged."""
    config = tiny_config(**ONE_LAYER)
    weights, chosen = tiny_weights(config), speculation_policy(policy)
    rng = random.Random(4)
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 30)]
    wanted = [
        request("said", texts[1][:20], chosen, seed=1, max_tokens=4),
        *(embedding_request(f"e{index}", text) for index, text in enumerate(texts)),
        embedding_request("again", texts[1]),
    ]
    proposers = lambda _: {"ngram": HostileProposer(VOCAB, random.Random(1))}  # noqa: E731
    setup = Setup(chosen, proposers, max_num_seqs=4, max_step_tokens=24, num_blocks=64)
    expected, found = (
        make(config, weights, setup).run(wanted) for make in (cpu_engine, gpu_engine)
    )
    assert found.tokens == expected.tokens
    assert len(found.tokens["said", 0]) == 4
    assert found.embeddings.keys() == {"e0", "e1", "again"}
    assert found.embeddings["again"] == found.embeddings["e1"]
    assert_close(found, expected)


def test_step_of_embeddings_alone_samples_nothing() -> None:
    """A step with only embeddings samples no row and returns the pooled rows."""
    config = tiny_config(**ONE_LAYER)
    weights, setup = tiny_weights(config), Setup(num_blocks=64, max_num_seqs=4)
    wanted = [embedding_request("e", range(1, 20)), embedding_request("f", range(20, 23))]
    expected, found = (
        make(config, weights, setup).run(wanted) for make in (cpu_engine, gpu_engine)
    )
    assert len(found.embeddings) == 2
    assert_close(found, expected)
