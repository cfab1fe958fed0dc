"""Compare whole generations between the modes of the engine.

All modes generate greedily for the same prompts and the same number of tokens. Times include
prefill. Each round runs all modes in alternating order, and medians count. The benchmark compares
the tokens of each output with those of the engine without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Final

from bench.engine.bench_engine import STEP_TOKENS, BenchEngine
from bench.engine.models import Model
from bench.engine.random_model import MOST_PROMPT
from bench.engine.serving import BATCHES, Prompt, Serving, greedy_requests, in_batches
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView, SpeculationMode

ENGINE_MODES: Final = (
    SpeculationMode.OFF,
    SpeculationMode.NGRAM,
    SpeculationMode.DRAFT_MODEL,
    SpeculationMode.AUTO,
)
DRAFT_MEMORY_FACTOR: Final = 2
"""Multiple of the memory of all prompts and outputs, which leaves space for pages of a draft model.
"""

Generate = Callable[[Many[Prompt]], list[list[int]]]


@dataclass
class Mode:
    """A mode of the engine, with its results.

    Attributes:
        taken_s: seconds of each run.
    """

    generate: Generate
    taken_s: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def run(self, prompts: Many[Prompt]) -> float:
        """Generate, and return the seconds."""
        started_s = time.perf_counter()
        self.outputs = self.generate(prompts)
        return time.perf_counter() - started_s


def measure_generation(
    bench_engine: BenchEngine, new_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each mode and batch size."""
    rows: list[dict[str, Any]] = []
    prompts = bench_engine.model.prompts(max(BATCHES))
    with Serving(_worker(bench_engine, new_tokens)) as serving:
        for batch in BATCHES:
            modes, groups = _modes(serving, new_tokens), in_batches(prompts, batch)
            _run_all(modes, groups, rounds)
            for row in _rows(modes, batch, new_tokens * sum(map(len, groups))):
                rows.append(row)
                print({"model": bench_engine.model.name, **row}, flush=True)
    return rows


def generation_worker(model: Model, new_tokens: int) -> LoadedEngine:
    """Load a checkpoint as a server does, with all its proposers."""
    longest = MOST_PROMPT + new_tokens
    kv_bytes = model.config.kv_bytes_per_token(model.dtype.itemsize)
    return load_engine(
        WorkerConfig(
            model=None if model.directory == SHIPPED_MODEL else str(model.directory),
            dtype=str(model.dtype).removeprefix("torch."),
            device=model.device.type,
            kv_bytes=DRAFT_MEMORY_FACTOR * max(BATCHES) * longest * kv_bytes,
            max_num_seqs=max(BATCHES),
            max_step_tokens=STEP_TOKENS,
        )
    )


def _worker(bench_engine: BenchEngine, new_tokens: int) -> LoadedEngine:
    if bench_engine.model.directory is None:
        return bench_engine.worker(speculation_policy("auto"), {})
    return generation_worker(bench_engine.model, new_tokens)


def _modes(serving: Serving, new_tokens: int) -> dict[str, Mode]:
    """Return the modes of the engine: no drafts, each proposer of the worker, and `auto`."""
    modes = [SpeculationMode.OFF]
    if serving.engine.proposers:
        modes = [mode for mode in ENGINE_MODES if _offered(mode, serving.engine)]
    return {mode.value: Mode(partial(_generate, serving, mode, new_tokens)) for mode in modes}


def _offered(mode: SpeculationMode, engine: LoadedEngine) -> bool:
    return mode in {SpeculationMode.OFF, SpeculationMode.AUTO} or mode.value in engine.proposers


def _generate(
    serving: Serving, mode: SpeculationMode, new_tokens: int, prompts: Many[Prompt]
) -> list[list[int]]:
    view = RequestView(len(prompts[0]), new_tokens, 0.0, mode)
    plan = speculation_policy("auto").decide(view, serving.engine.worker.load())
    generation = serving.run(greedy_requests(prompts, new_tokens, plan))
    return [generation.outputs[str(index)] for index in range(len(prompts))]


def _run_all(modes: dict[str, Mode], groups: list[list[Prompt]], rounds: int) -> None:
    """Run all modes on every group of prompts."""
    outputs: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):
        seconds = dict.fromkeys(modes, 0.0)
        outputs = {name: [] for name in modes}
        for group in groups:
            order = list(modes.items())
            for name, mode in order if turn % 2 else reversed(order):
                seconds[name] += mode.run(group)
                outputs[name] += mode.outputs
        if turn:  # the first round is a warm-up
            for name, mode in modes.items():
                mode.taken_s.append(seconds[name])
    for name, mode in modes.items():
        mode.outputs = outputs[name]


def _rows(modes: dict[str, Mode], batch: int, tokens: int) -> list[dict[str, Any]]:
    plain = modes[SpeculationMode.OFF.value]
    return [
        {
            "who": name,
            "batch": batch,
            "tokens_per_s": round(tokens / median(mode.taken_s), 1),
            **agreement(mode.outputs, plain.outputs),
        }
        for name, mode in modes.items()
    ]


def agreement(outputs: Many[Many[int]], expected: Many[Many[int]]) -> dict[str, float]:
    """Return the share of equal outputs, and the share of tokens before the first difference."""
    equal = [list(output) == list(other) for output, other in zip(outputs, expected, strict=True)]
    before = sum(map(_common_length, outputs, expected))
    tokens = sum(map(len, expected))
    return {
        "equal_outputs": round(sum(equal) / len(equal), 3),
        "equal_tokens": round(before / tokens, 3),
    }


def _common_length(output: Many[int], expected: Many[int]) -> int:
    """Return the length of the common prefix of two outputs."""
    differing = (i for i, (a, b) in enumerate(zip(output, expected, strict=False)) if a != b)
    return next(differing, min(len(output), len(expected)))
