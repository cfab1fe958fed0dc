"""Steps of the engine, against what memory allows and against `transformers`, in one run.

    draftgate bench engine --json OUT

Each round runs every step once with us and once with `transformers` on the same weights, in
alternating order; medians count. A step is one forward pass and the choice of the greedy token.
Texts do not matter to a step's time, so weights may be random; the shape of 82M parameters is.
A busy machine is refused: what others use of memory's bandwidth is missing from the figures.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch

from backends.core.drafts import Draft
from backends.core.sequence import Sequence
from backends.core.steps import SequenceWork, StepPlan
from backends.engine.bench.loading import random_checkpoint
from backends.engine.bench.record import provenance, refuse_if_disturbed
from backends.engine.checkpoint import Checkpoint
from backends.engine.config import ModelConfig, read_model_config
from backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from backends.engine.model import Decoder
from backends.engine.runner import Runner
from backends.engine.weights import load_weights
from backends.shipped import SHIPPED_MODEL
from backends.types import GenerationRequest, ResumedChoice, SamplingParams
from policies.speculation import Off
from policies.types import RequestView, WorkerLoad

SHAPE_82M: Final[dict[str, Any]] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 9,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

CONTEXT_TOKENS: Final = 512
PREFILL_TOKENS: Final = 256
VERIFIED_TOKENS: Final = 5
BATCHES: Final = (1, 8, 32)
ROUNDS: Final = 15
WARM_ROUNDS: Final = 2

READ_BYTES: Final = 256 << 20
"""What is read to measure the bandwidth: far more than caches hold."""


class Case(NamedTuple):
    """A step: `tokens` of each of `batch` sequences behind `context_tokens`."""

    name: str
    batch: int
    tokens: int
    context_tokens: int


def cases() -> Iterator[Case]:
    """Yield the steps that are measured."""
    for batch in BATCHES:
        yield Case("decode", batch, 1, CONTEXT_TOKENS)
    for batch in BATCHES[:2]:
        yield Case("verify", batch, VERIFIED_TOKENS, CONTEXT_TOKENS)
    yield Case("prefill", 1, PREFILL_TOKENS, 0)


@dataclass(frozen=True)
class Ours:
    """The engine with one model."""

    config: ModelConfig
    runner: Runner
    weight_bytes: int

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype) -> Ours:
        """Load a model, with a pool that holds the largest case."""
        config = read_model_config(directory)
        longest = CONTEXT_TOKENS + VERIFIED_TOKENS
        pool = KvPool(config, max(BATCHES) * -(-longest // BLOCK_TOKENS), dtype)
        for layer in pool.layers:
            layer.uniform_(-1.0, 1.0)  # else it is one page of zeros, which fits any cache
        decoder = Decoder(config, load_weights(directory, config, dtype), longest)
        num_bytes = Checkpoint(directory).num_parameters * dtype.itemsize
        return cls(config, Runner(decoder, pool), num_bytes)

    def plan(self, case: Case) -> StepPlan:
        """Return the step."""
        return StepPlan(tuple(self._work(case, index) for index in range(case.batch)))

    def step_s(self, plan: StepPlan) -> float:
        """Run the step."""
        return self.runner.execute(plan).step_s

    def read_bytes(self, case: Case, dtype: torch.dtype) -> int:
        """Return what a step has to read: all weights once, and the keys and values."""
        kv_bytes = self.config.kv_bytes_per_token(dtype.itemsize)
        return self.weight_bytes + case.batch * case.context_tokens * kv_bytes

    def _work(self, case: Case, index: int) -> SequenceWork:
        plan = Off().decide(RequestView(1, 1, 0.0), WorkerLoad(0, 0, 0, 0, 0.0, 0.0, ()))
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        request = GenerationRequest(str(index), (1,), sampling, plan)
        sequence = Sequence.of(index, request, ResumedChoice(0, ()))
        blocks = -(-(case.context_tokens + case.tokens) // BLOCK_TOKENS)
        sequence.block_table.extend(range(index * blocks, (index + 1) * blocks))
        vocab_size = self.config.vocab_size
        tokens = tuple(token % vocab_size for token in range(1, case.tokens + 1))
        start = case.context_tokens
        if case.name == "prefill":
            return SequenceWork(sequence, start, tokens, samples=True)
        return SequenceWork(sequence, start, tokens[:1], samples=True, draft=Draft(tokens[1:]))


class Transformers:
    """`transformers` with the same weights, its cache filled anew before each step."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        """Load the model.

        Raises:
            ImportError: it is not installed.
        """
        from transformers import AutoModelForCausalLM

        self._dtype = dtype
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    @torch.inference_mode()
    def step_s(self, case: Case) -> float:
        """Run the step: a forward pass that keeps the logits it needs, and the greedy tokens."""
        cache = self._cache(case)
        ids = torch.ones(case.batch, case.tokens, dtype=torch.int64)
        positions = torch.arange(case.context_tokens, case.context_tokens + case.tokens)
        kept = 1 if case.name == "prefill" else 0
        started_s = time.perf_counter()
        logits = self._model(
            input_ids=ids,
            position_ids=positions.expand(case.batch, -1),
            past_key_values=cache,
            logits_to_keep=kept,
        ).logits
        logits.argmax(-1)
        return time.perf_counter() - started_s

    def _cache(self, case: Case) -> Any:
        from transformers import DynamicCache

        config = self._model.config
        cache = DynamicCache(config=config)
        if not case.context_tokens:
            return cache
        shape = (case.batch, config.num_key_value_heads, case.context_tokens, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(*(torch.randn(shape).to(self._dtype) for _ in range(2)), layer)
        return cache


def bandwidth() -> float:
    """Return bytes per second that the threads in use read from memory, the best of several."""
    numbers = torch.ones(READ_BYTES // 4)
    taken = []
    for _ in range(7):
        started_s = time.perf_counter()
        numbers.sum()
        taken.append(time.perf_counter() - started_s)
    return READ_BYTES / min(taken)


def measure_model(directory: Path, dtype: torch.dtype, read_s: float) -> list[dict[str, Any]]:
    """Return a row for each case of a model.

    Args:
        read_s: seconds that reading a byte takes.
    """
    ours, theirs = Ours.load(directory, dtype), _transformers(directory, dtype)
    plans = [(case, ours.plan(case)) for case in cases()]
    taken: dict[Case, tuple[list[float], list[float]]] = {case: ([], []) for case, _ in plans}
    for turn in range(ROUNDS + WARM_ROUNDS):
        for case, plan in plans:
            runs = [lambda plan=plan: taken[case][0].append(ours.step_s(plan))]  # noqa: B023
            if theirs is not None:
                runs.append(lambda case=case: taken[case][1].append(theirs.step_s(case)))
            for run in runs if turn % 2 else reversed(runs):
                run()
    return [
        _row(case, ours.read_bytes(case, dtype) * read_s, *(t[WARM_ROUNDS:] for t in taken[case]))
        for case in taken
    ]


def _row(case: Case, floor_s: float, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    row: dict[str, Any] = {
        **case._asdict(),
        "ms": round(1e3 * median(ours), 3),
        "best_ms": round(1e3 * min(ours), 3),
        "tokens_per_s": round(case.batch * case.tokens / median(ours), 1),
        "share_of_bandwidth": round(floor_s / median(ours), 3),
    }
    if theirs:
        ratios = sorted(their / our for our, their in zip(ours, theirs, strict=True))
        row |= {
            "transformers_ms": round(1e3 * median(theirs), 3),
            "speedup": round(median(ratios), 3),
            "speedup_quartiles": [round(ratios[len(ratios) * q // 4], 3) for q in (1, 3)],
        }
    return row


def _transformers(directory: Path, dtype: torch.dtype) -> Transformers | None:
    try:
        return Transformers(directory, dtype)
    except ImportError:
        return None


def measure(dtypes: list[str], *, allow_busy: bool) -> dict[str, Any]:
    """Return the whole measurement.

    Raises:
        SystemExit: the machine is busy.
    """
    facts = provenance()
    refuse_if_disturbed(facts, allow_busy=allow_busy)
    read_s = 1 / bandwidth()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "shipped": SHIPPED_MODEL,
            "random 82M": random_checkpoint(Path(folder), **SHAPE_82M),
        }
        for name, directory in models.items():
            for dtype in dtypes:
                for row in measure_model(directory, getattr(torch, dtype), read_s):
                    results.append({"model": name, "dtype": dtype, **row})
                    print(results[-1], flush=True)
    return {**facts, "read_gb_per_s": round(1e-9 / read_s, 1), "results": results}


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="draftgate bench engine", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--threads", type=int, help="default: as many as there are cores")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--allow-busy", action="store_true")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    result = measure(args.dtypes, allow_busy=args.allow_busy)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
