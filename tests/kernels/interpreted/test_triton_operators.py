"""The decoder on the Triton kernels against the same decoder in torch, in float32."""

from __future__ import annotations

import pytest
import torch

from backends.core.drafts import ROOT, Draft
from backends.core.steps import SequenceWork, StepPlan
from backends.engine.kv_pool import KvPool
from backends.engine.runner import Runner
from tests.engine.feeding import Table
from tests.engine.tiny import VOCAB, tiny_config, tiny_weights, torch_decoder, triton_decoder

# Triton 3.6 interprets loop bounds in a way that NumPy 2.3 deprecates (and 2.4 refuses).
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

BLOCKS = 24

TREE = Draft((11, 12, 13, 14, 15, 16, 17, 18), (ROOT, 0, ROOT, 1, 2, 0, 5, 2)).laid_out()
"""Three branches below the first token's sibling and its children."""

CONFIGS = {
    "plain": {},
    "windows": {"windows": (20, None)},
    "norms and biases": {"qk_norm": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "one head for all": {"num_heads": 3, "num_kv_heads": 1, "tied_embeddings": True},
    "no groups": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 10},
}


def tokens(count: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(
        torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    )


def plans() -> list[StepPlan]:
    """Prompts, then steps that mix chunks, decodes, and chains and trees to verify."""
    table = [
        Table([9, 8, 7, 6, 5, 4]),
        Table([0, 1, 2]),
        Table([20, 3, 10]),
        Table([11, 12, 13, 14, 15]),
    ]
    text = [tokens(60, seed) for seed in range(4)]
    return [
        StepPlan(
            (
                SequenceWork(table[0], 0, text[0][:40], True),
                SequenceWork(table[1], 0, text[1][:17], True),
                SequenceWork(table[2], 0, text[2][:13], False),
            )
        ),
        StepPlan(
            (
                SequenceWork(table[0], 40, text[0][40:41], True, TREE),
                SequenceWork(table[1], 17, text[1][17:18], True),
                SequenceWork(table[2], 13, text[2][13:30], True, TREE.first(3).laid_out()),
                SequenceWork(table[3], 0, text[3][:50], False),
            )
        ),
        StepPlan(
            (
                SequenceWork(table[0], 41, text[0][41:42], True, Draft((1, 2, 3))),
                SequenceWork(table[1], 18, text[1][18:19], True, Draft(tokens(5))),
                SequenceWork(table[3], 50, text[3][50:51], True),
            )
        ),
        StepPlan((SequenceWork(table[2], 30, text[2][30:35], False),)),
    ]


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_decoder_on_triton_equals_the_decoder_in_torch(changes: dict[str, object]) -> None:
    """Chunks, decodes, chains and trees in one batch have torch's logits, keys and values."""
    config = tiny_config(**changes)
    weights = tiny_weights(config)
    pools = [KvPool(config, BLOCKS, torch.float32) for _ in range(2)]
    runners = [
        Runner(make(config, weights), pool)
        for make, pool in zip((torch_decoder, triton_decoder), pools, strict=True)
    ]
    with torch.inference_mode():
        for plan in plans():
            expected, found = (runner.logits(plan) for runner in runners)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    used = BLOCKS * 16
    for layer, wanted in zip(pools[1].layers, pools[0].layers, strict=True):
        torch.testing.assert_close(layer[:, :used], wanted[:, :used], rtol=1e-5, atol=1e-5)
