"""Log probabilities of prompts on the GPU runner in the interpreter and on the CPU runner."""

from __future__ import annotations

import random

import pytest

from draftgate.policies.registry import speculation_policy
from tests.engine.harness import HostileProposer, Setup, embedding_request, request
from tests.engine.tiny_model import VOCAB, cpu_engine, gpu_engine, tiny_config, tiny_weights

# test_gpu_runner.py tests two layers.
ONE_LAYER = {"num_layers": 1, "windows": (None,), "num_heads": 2, "num_kv_heads": 1}


@pytest.mark.parametrize("policy", [pytest.param("off", marks=pytest.mark.long), "fixed:3"])
def test_prompts_are_scored_in_steps_with_decodes_drafts_and_embeddings(policy: str) -> None:
    """Chunks in overlapped steps and beside trees give the log probabilities of the CPU runner."""
    config = tiny_config(**ONE_LAYER)
    weights, chosen = tiny_weights(config), speculation_policy(policy)
    rng = random.Random(4)
    text = [rng.randrange(VOCAB) for _ in range(40)]
    scored = {"prompt_logprobs": 2, "temperature": 0.0}
    wanted = [
        request("said", text[:20], chosen, seed=1, max_tokens=4),
        request("scored", text, chosen, max_tokens=3, **scored),
        embedding_request("embedded", text[:30]),
        request("again", text, chosen, max_tokens=0, **scored),
    ]
    proposers = lambda _: {"ngram": HostileProposer(VOCAB, random.Random(1))}  # noqa: E731
    setup = Setup(chosen, proposers, max_num_seqs=4, max_step_tokens=24, num_blocks=64)
    expected, found = (
        make(config, weights, setup).run(wanted) for make in (cpu_engine, gpu_engine)
    )
    assert found.tokens == expected.tokens
    assert found.prompt_logprobs.keys() == expected.prompt_logprobs.keys() == {"scored", "again"}
    for name, columns in expected.prompt_logprobs.items():
        tokens = list(found.prompt_logprobs[name].scored_tokens())
        assert len(tokens) == 39
        for one, other in zip(tokens, columns.scored_tokens(), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.rank == other.rank
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
