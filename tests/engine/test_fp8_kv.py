"""A KV cache in FP8: the published arithmetic, the same text with any drafts, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.harness.prompts import held_out_prompts
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.operators.base import rotary_tables
from draftgate.backends.engine.operators.reference import TorchOperators
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from draftgate.backends.kv_transfer.format import format_refusal
from draftgate.backends.types import ModelCard
from draftgate.backends.worker_config import WorkerConfig
from tests.engine.eagle_engine import check_head
from tests.engine.harness import MAX_MODEL_LEN, Model
from tests.engine.mixed_batches import at_random
from tests.engine.shipped_proposers import check_shipped_proposers
from tests.engine.step_logits import blocks_of, logits_in_steps

TOKENS = 300


@pytest.fixture(scope="module")
def fp8() -> Model:
    """The shipped model with a KV cache in FP8."""
    return Model(SHIPPED_MODEL, kv_dtype=FP8)


def text(model: Model) -> list[int]:
    """Return the tokens of a text that the model was not trained on."""
    prompts = held_out_prompts(model.tokenizer, 8, least=60, most=120)
    return [token for prompt in prompts for token in prompt][:TOKENS]


def expected_logits(token_ids: list[int], *, rounded: bool) -> Tensor:
    """Return the logits of transformers, whose cache rounds keys and values to E4M3."""
    transformers = pytest.importorskip("transformers")

    class Fp8Cache(transformers.DynamicCache):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            keys, values = (x.clamp(-448, 448).to(FP8).to(x.dtype) for x in (keys, values))
            return super().update(keys, values, *args, **kwargs)

    model = transformers.LlamaForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    cache = (Fp8Cache if rounded else transformers.DynamicCache)()
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([token_ids]), past_key_values=cache).logits[0]
    return found


def test_logits_are_those_of_transformers_with_rounded_keys_and_values(fp8: Model) -> None:
    """Prefill and decodes have the logits of transformers in float32 with rounded keys and values,
    from which those of unrounded ones differ far more."""
    tokens = text(fp8)
    found = logits_in_steps(fp8.runner(32), blocks_of(0, TOKENS), tokens, [0, 250, 290, 299, 300])
    expected, unrounded = (expected_logits(tokens, rounded=flag) for flag in (True, False))
    scale = expected.std()
    # A key that lies between two numbers of E4M3 up to the last bit of float32 may be rounded to
    # either, depending on the processor. All rows from its token on then differ by more than
    # float32 rounding: on a Zen 3, which has no AVX-512, by 0.001.
    rows = ((found - expected).abs().amax(1) / scale).sort().values
    assert rows[:8].max() < 1e-4
    assert rows.median() < 0.005
    assert rows.max() < 0.05
    assert ((found - unrounded).abs().amax(1) / scale).median() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_c", [True, False])
def test_chunks_do_not_change_a_bit(in_c: bool, dtype: torch.dtype) -> None:
    """A token has the same logits in one step and in chunks, so that rows read the rounded keys and
    values of their own step as well."""
    model = Model(SHIPPED_MODEL, dtype, kv_dtype=FP8)
    if not in_c:
        tables = rotary_tables(model.config, MAX_MODEL_LEN, dtype)
        model.decoder.operators = TorchOperators(model.config, tables)
    tokens = text(model)
    at_once, *others = (
        logits_in_steps(model.runner(32), blocks_of(0, TOKENS), tokens, edges)
        for edges in ([0, TOKENS], [0, 1, 2, 40, 257, TOKENS], [*range(0, TOKENS + 1, 20)])
    )
    assert all(torch.equal(at_once, other) for other in others)


BATCHINGS = (
    {"max_num_seqs": 8, "max_step_tokens": 48, "num_blocks": 42},
    {"max_num_seqs": 16, "max_step_tokens": 300},
)


def test_drafts_of_all_proposers_do_not_change_a_token(fp8: Model) -> None:
    """Drafts of the draft model, of sparse self-speculation and of random trees leave the text of
    `off`, with chunked prompts, cache hits and preemptions."""
    check_shipped_proposers(fp8, BATCHINGS)


def test_trees_of_a_head_do_not_change_a_token(fp8: Model, tmp_path: Path) -> None:
    """Trees of n-gram drafts and of an EAGLE-3 head, whose cache is also in FP8, leave the text
    of `off`."""
    check_head(fp8, tmp_path, at_random(BATCHINGS), num_prompts=6)


def card_of(**settings: Any) -> ModelCard:
    config = WorkerConfig(device="cpu", threads=1, max_model_len=512, kv_bytes=4 << 20, **settings)
    return load_engine(config).served.card


def test_fp8_holds_more_tokens_and_shares_no_block_with_other_workers() -> None:
    """`--kv-cache-dtype fp8` holds four times the tokens of float32 and twice those of bfloat16 in
    the same memory, and no other worker takes its blocks."""
    cards = {
        (dtype, kv): card_of(dtype=dtype, kv_cache_dtype=kv)
        for dtype in ("float32", "bfloat16")
        for kv in ("auto", "fp8")
    }
    for dtype, times in (("float32", 4), ("bfloat16", 2)):
        own, fp8 = cards[dtype, "auto"], cards[dtype, "fp8"]
        assert own.kv_format is not None
        assert fp8.kv_format is not None
        assert own.kv_format.token_bytes == times * fp8.kv_format.token_bytes
        assert fp8.pool_tokens // 16 == (4 << 20) // fp8.kv_format.block_bytes
        assert fp8.pool_tokens >= times * own.pool_tokens
    classes = {card.numerics_class for card in cards.values()}
    assert len(classes) == 4
    fp8 = cards["float32", "fp8"]
    assert format_refusal(fp8.kv_format, fp8.kv_format) is None
    for key, other in cards.items():
        if key != ("float32", "fp8"):
            assert "numerics_class" in str(format_refusal(fp8.kv_format, other.kv_format))
            assert "numerics_class" in str(format_refusal(other.kv_format, fp8.kv_format))
