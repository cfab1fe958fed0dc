"""Measure what keys and values in FP8 change: predictions, texts, accepted drafts, attention times.

    python -m bench.engine.fp8_kv --json bench/results/fp8-kv.json

The predictions are those of the shipped model in float32 for held-out code. One variant rounds keys
and values to E4M3 as the engine does, with the scale 1. Others have a scale for each token and
head. The greedy texts and the drafts are those of `bench.engine.proposers`. After their first
difference, texts have other contexts. The attention of one layer reads a cache in the dtype of the
weights and one in FP8, in turns. Its times are CPU time of one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from bench.engine.proposers import KV_BYTES, NEW_TOKENS, SLOTS, TEMPERATURES, run, tasks
from bench.harness.prompts import held_out_prompts
from bench.harness.provenance import provenance, require_quiet
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.inputs import AttentionSpan, AttentionSpans, Feed, StepInputs
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KV_TILE, KvPool
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.operators.base import RotaryTables, rotary_tables
from draftgate.backends.engine.operators.choose import operators_for
from draftgate.backends.engine.operators.reference import TorchOperators, TorchStep
from draftgate.backends.engine.quantisation.e4m3 import fp8_rows, scaled
from draftgate.backends.engine.quantisation.fp8_kv import FP8, read
from draftgate.backends.engine.rope import Rope
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import SpeculationMode, SpeculationPlan

TEXTS: Final = 96
TEXT_TOKENS: Final = 240
ROUNDS: Final = 15

TASKS: Final = ("completion", "rewrite")
CACHES: Final = ("auto", "fp8")

SHAPES: Final = {"shipped": (8, 4, 32), "Llama-3.1-8B": (32, 8, 128)}
"""Query heads, KV heads and head_dim of the timed attention."""

BATCHES: Final = ((1, 4096, 1), (8, 2048, 1), (8, 2048, 5), (1, 4096, 128))
"""Sequences, context tokens, and rows of each sequence."""

Rounding = Callable[[Tensor], Tensor]


def _with_scales(kv: Tensor, dtype: torch.dtype) -> Tensor:
    """Round heads, [..., head_dim], with a scale for each, stored in a dtype."""
    rows = kv.flatten(0, -2)
    codes, scales = fp8_rows(rows, rows.shape[1])
    if dtype is not torch.float32:
        scales = scales.to(dtype).float()
        codes = (rows / scales).clamp(-448, 448).to(FP8)
    return scaled(codes, scales, rows.shape[1]).view(kv.shape)


ROUNDINGS: Final[Mapping[str, Rounding]] = {
    "none": lambda kv: kv,
    "scale 1": lambda kv: read(kv.clamp(-448, 448).to(FP8), torch.float32),
    "scale per token and head (float32)": lambda kv: _with_scales(kv, torch.float32),
    "scale per token and head (float16)": lambda kv: _with_scales(kv, torch.float16),
}


class RoundingOperators(TorchOperators):
    """Operators that round keys and values in a float32 cache."""

    def __init__(
        self, config: ModelConfig, tables: Mapping[Rope, RotaryTables], rounding: Rounding
    ) -> None:
        super().__init__(config, tables)
        self._rounding = rounding
        self.largest = 0.0

    def rotate_and_store(
        self,
        step: TorchStep,
        fused: Tensor,
        layer_kv: Tensor,
        qk_norm: Tensor | None,
        rope: Rope | None = None,
    ) -> Tensor:
        """Rotate and store, and then round what was stored."""
        queries = super().rotate_and_store(step, fused, layer_kv, qk_norm, rope)
        kv = layer_kv[:, step.slots]
        self.largest = max(self.largest, float(kv.abs().max()))
        layer_kv[:, step.slots] = self._rounding(kv)
        return queries


def predictions() -> list[dict[str, Any]]:
    """Compare each rounding with the first one.

    Returns:
        Of each rounding, the loss, the share of predictions equal to those of the first one, and
        the mean Kullback-Leibler divergence from its distributions, in nats.
    """
    config = read_model_config(SHIPPED_MODEL)
    decoder = Decoder(config, load_weights(SHIPPED_MODEL, config, torch.float32), TEXT_TOKENS)
    tables = rotary_tables(config, TEXT_TOKENS, torch.float32)
    pages = range(-(-TEXT_TOKENS // BLOCK_TOKENS))
    runner = Runner(decoder, KvPool(config, len(pages), torch.float32))
    tokenizer = Tokenizer(SHIPPED_MODEL)
    texts = held_out_prompts(tokenizer, TEXTS, seed=7, least=TEXT_TOKENS, most=TEXT_TOKENS)
    rows, first = list[dict[str, Any]](), Tensor()
    following = torch.tensor([token for one in texts for token in one[1:]])
    for name, rounding in ROUNDINGS.items():
        operators = decoder.operators = RoundingOperators(config, tables, rounding)
        logits = torch.cat([runner.forward([Feed(t, 0, pages, len(t))])[:-1] for t in texts])
        found = logits.log_softmax(1)
        first = first if rows else found
        loss = functional.nll_loss(found, following).item()
        equal = (found.argmax(1) == first.argmax(1)).float().mean().item()
        divergence = functional.kl_div(found, first, reduction="batchmean", log_target=True).item()
        rows.append(
            {
                "rounding": name,
                "tokens": len(found),
                "loss": loss,
                "equal": equal,
                "divergence": divergence,
            }
        )
        print(rows[-1], f"largest {operators.largest:.1f}", flush=True)
    return rows


def greedy_texts() -> list[dict[str, Any]]:
    """Compare greedy texts with a cache in FP8 and in float32."""
    texts = dict[str, dict[str, list[list[int]]]]()
    for name in CACHES:
        engine = load_engine(
            WorkerConfig(speculation="off", kv_bytes=KV_BYTES, kv_cache_dtype=name, max_num_seqs=8)
        )
        prompts = tasks(engine.worker.tokenizer)
        texts[name] = {task: _greedy(engine, prompts[task]) for task in TASKS}
    rows = []
    for task in TASKS:
        pairs = list(zip(texts["auto"][task], texts["fp8"][task], strict=True))
        lengths = [_equal_tokens(*pair) for pair in pairs]
        tokens = {"new_tokens": NEW_TOKENS, "median_equal_tokens": median(lengths)}
        equal = sum(auto == fp8 for auto, fp8 in pairs)
        rows.append({"task": task, "texts": len(pairs), "equal_texts": equal, **tokens})
        print(rows[-1], flush=True)
    return rows


def _greedy(engine: LoadedEngine, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    plan = SpeculationPlan("bench", SpeculationMode.OFF, None, 0, "a benchmark")
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(NEW_TOKENS, index, 0.0, ignore_eos=True)
        engine.worker.submit(GenerationRequest(str(index), compact(prompt), sampling, plan))
    texts: list[list[int]] = [[] for _ in prompts]
    for step in run_until_idle(engine.worker, engine.executor):
        for work, emitted in zip(step.plan.work, step.result.emitted, strict=True):
            texts[int(work.sequence.request.request_id)] += emitted
    return texts


def _equal_tokens(text: list[int], other: list[int]) -> int:
    """Return the number of tokens before the first difference."""
    differ = (index for index, pair in enumerate(zip(text, other, strict=True)) if len({*pair}) > 1)
    return next(differ, len(text))


def accepted_drafts() -> list[dict[str, Any]]:
    """Return the accepted drafts of each proposer, with caches in float32 and in FP8."""
    rows = []
    for proposer in ("ngram", "draft_model"):
        for kv_cache_dtype in CACHES:
            engine = load_engine(
                WorkerConfig(
                    proposer=proposer,
                    speculation=f"fixed:{max(SLOTS)}",
                    kv_bytes=KV_BYTES,
                    kv_cache_dtype=kv_cache_dtype,
                    max_num_seqs=8,
                )
            )
            prompts = tasks(engine.worker.tokenizer)
            for task in TASKS:
                for temperature in TEMPERATURES:
                    tally = run(engine, prompts[task], proposer, min(SLOTS), temperature)
                    head = {"proposer": proposer, "kv_cache_dtype": kv_cache_dtype, "task": task}
                    rows.append({**head, "temperature": temperature, **tally.summary()})
                    print(rows[-1], flush=True)
    return rows


def attention_times() -> list[dict[str, Any]]:
    """Return the milliseconds of the attention of a layer."""
    rows = []
    for name, (heads, kv_heads, head_dim) in SHAPES.items():
        config = replace(
            read_model_config(SHIPPED_MODEL),
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, windows=(None,),
        )  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            for batch in BATCHES:
                times_ms = _attention_ms(config, dtype, *batch)
                head = {"shape": name, "dtype": str(dtype).removeprefix("torch.")}
                sizes = dict(zip(("sequences", "context_tokens", "rows"), batch, strict=True))
                ratio = round(times_ms["fp8"] / times_ms["auto"], 3)
                rows.append({**head, **sizes, **times_ms, "fp8_to_auto": ratio})
                print(rows[-1], flush=True)
    return rows


def _attention_ms(
    config: ModelConfig, dtype: torch.dtype, sequences: int, context_tokens: int, rows: int
) -> dict[str, float]:
    operators = operators_for(config, dtype, 1)
    blocks = context_tokens // BLOCK_TOKENS
    spans = AttentionSpans()
    for index in range(sequences):
        pages = range(index * blocks, (index + 1) * blocks)
        spans.add(AttentionSpan(rows, context_tokens - rows, pages))
    places = torch.zeros(sequences * rows, dtype=torch.int64)
    step = operators.begin(StepInputs(places, places, places, spans, places[:0], 0))
    slots = sequences * context_tokens + KV_TILE
    kv = torch.randn(2 * config.num_kv_heads, slots, config.head_dim)
    queries = torch.randn(len(places), config.num_heads, config.head_dim).to(dtype) / 6
    caches = {"auto": kv.to(dtype), "fp8": kv.to(FP8)}
    times_ms: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(ROUNDS):
        for name, cache in caches.items():
            began_s = time.thread_time()
            operators.attend(step, queries, cache, None)
            times_ms[name].append((time.thread_time() - began_s) * 1e3)
    return {name: round(median(found), 4) for name, found in times_ms.items()}


PARTS: Final[Mapping[str, Callable[[], list[dict[str, Any]]]]] = {
    "predictions": predictions,
    "greedy_texts": greedy_texts,
    "accepted_drafts": accepted_drafts,
    "attention_times": attention_times,
}


def main() -> None:
    """Measure the parts, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--allow-busy", action="store_true", help="measure on a busy machine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = provenance()
    require_quiet(facts, allow_busy=given.allow_busy)
    results = {**facts, **{part: PARTS[part]() for part in given.parts}}
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
