"""The decoder on the Triton kernels, compared with the torch decoder in float32."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.rope import Rope
from draftgate.backends.engine.runner import Runner
from tests.engine.tiny_model import (
    MIXED_BLOCKS,
    TINY_EXPERTS,
    mixed_plans,
    tiny_config,
    tiny_weights,
    torch_decoder,
    triton_decoder,
)

# A single layer is enough if all layers are alike.
ONE_LAYER = {"num_layers": 1, "windows": (None,)}
CONFIGS = {
    "a layer with a window and one without": {"windows": (20, None)},
    "norms and biases": {
        "qk_norm": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        **ONE_LAYER,
    },
    "one head for all": {"num_heads": 3, "num_kv_heads": 1, "tied_embeddings": True, **ONE_LAYER},
    "features of Gemma and a rotation in part": {
        "activation": "gelu",
        "sandwich_norms": True,
        "embedding_scale": 6.25,
        "query_scalar": 24.0,
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
        "windows": (20, None),
        "layer_ropes": (Rope(500.0), Rope(1e4, share=0.5)),
        "rope": Rope(500.0),
    },
    "experts": {"experts": TINY_EXPERTS},
    "no groups": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 10, **ONE_LAYER},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_decoder_on_triton_equals_the_decoder_in_torch(changes: dict[str, object]) -> None:
    """The decoders on Triton and in torch compute equal logits, keys and values for all kinds of
    steps."""
    config = tiny_config(**changes)
    weights = [tiny_weights(config, grouped=grouped) for grouped in (False, True)]
    pools = [KvPool(config, MIXED_BLOCKS, torch.float32) for _ in range(2)]
    runners = [
        Runner(make(config, of_make), pool)
        for make, of_make, pool in zip((torch_decoder, triton_decoder), weights, pools, strict=True)
    ]
    with torch.inference_mode():
        for plan in mixed_plans():
            expected, found = (runner.logits(plan) for runner in runners)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    used = MIXED_BLOCKS * BLOCK_TOKENS
    for layer, wanted in zip(pools[1].layers, pools[0].layers, strict=True):
        torch.testing.assert_close(layer[:, :used], wanted[:, :used], rtol=1e-5, atol=1e-5)
