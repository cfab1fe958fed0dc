"""Compare steps of the engine with the limits of the device and with `transformers`.

Each round runs every step once with each contender, in alternating order, and medians count. A step
is a forward pass and the choice of the greedy token. Its time does not depend on the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import torch

from bench.engine.bench_engine import BenchEngine
from bench.engine.cases import Case, flops, read_bytes
from bench.engine.device import Rates, elapsed_s, release
from bench.engine.models import Model

WARM_ROUNDS: Final = 2


@dataclass
class Contender:
    """An engine that runs steps, and its times.

    Attributes:
        step_s: function that runs a step and returns its seconds.
        is_peer: whether it is another engine, which may raise any error on this device.
        failed: error message of each case that failed.
    """

    step_s: Callable[[Case], float]
    is_peer: bool = False
    taken: dict[Case, list[float]] = field(default_factory=dict)
    failed: dict[Case, str] = field(default_factory=dict)

    def run(self, case: Case) -> None:
        """Run a step, unless an earlier step of the case failed."""
        if case in self.failed:
            return
        try:
            self.taken.setdefault(case, []).append(self.step_s(case))
        except torch.OutOfMemoryError:
            self.failed[case] = "out of memory"
            release(torch.device("cuda"))
        except Exception as error:
            if not self.is_peer:
                raise
            self.failed[case] = reason(error)

    def times(self, case: Case) -> list[float]:
        """Return the seconds of each round after the warm-up, or nothing after a failure."""
        return [] if case in self.failed else self.taken[case][WARM_ROUNDS:]


def measure_steps(
    bench_engine: BenchEngine,
    cases: list[Case],
    rates: Rates,
    rounds: int,
    *,
    alone: bool = False,
    keep: Callable[[list[dict[str, Any]]], None] = lambda _rows: None,
) -> list[dict[str, Any]]:
    """Return a row for each case of a model.

    Args:
        alone: whether to skip `transformers` and exact mode (see `exact.py`).
        keep: called after each step with the times so far, warm-up included.
    """
    contenders = _contenders(bench_engine, alone=alone)
    for turn in range(rounds + WARM_ROUNDS):
        for case in cases:
            order = list(contenders.values())
            for contender in order if turn % 2 else reversed(order):
                contender.run(case)
            keep(_so_far(contenders["ours"]))
    rows = [_row(bench_engine.model, case, rates, contenders) for case in cases]
    for row in rows:
        print({"model": bench_engine.model.name, **row}, flush=True)
    return rows


def _so_far(contender: Contender) -> list[dict[str, Any]]:
    """Return the median of all times of each case, for a run that may crash."""
    return [
        {**case._asdict(), "ms": round(1e3 * median(taken), 3), "runs": len(taken)}
        for case, taken in contender.taken.items()
        if taken
    ]


def _contenders(bench_engine: BenchEngine, *, alone: bool) -> dict[str, Contender]:
    found = {"ours": Contender(bench_engine.step_s)}
    if bench_engine.model.device.type == "cuda":
        found["device"] = Contender(bench_engine.device_s)
    elif bench_engine.model.dtype is not torch.float32 and not alone:
        found["exact"] = Contender(bench_engine.exact().step_s)
    if not alone:
        try:
            theirs = TransformersSteps(bench_engine.model)
            found["transformers"] = Contender(theirs.step_s, is_peer=True)
        except Exception as error:  # noqa: BLE001 - an import or a model of a peer may raise anything
            print(f"the comparison with transformers is skipped: {reason(error)}", flush=True)
    return found


def _row(
    model: Model, case: Case, rates: Rates, contenders: dict[str, Contender]
) -> dict[str, Any]:
    if case in contenders["ours"].failed:
        return {**case._asdict(), "failed": contenders["ours"].failed[case]}
    engine_s = contenders["ours"].times(case)
    row: dict[str, Any] = {
        **case._asdict(),
        "ms": round(1e3 * median(engine_s), 3),
        "best_ms": round(1e3 * min(engine_s), 3),
        "tokens_per_s": round(case.batch * case.tokens / median(engine_s), 1),
    }
    device_s = median(engine_s)
    if "device" in contenders:
        device_s = median(contenders["device"].times(case))
        row["device_ms"] = round(1e3 * device_s, 3)
    row |= _shares(model, case, rates, device_s)
    if "exact" in contenders and case not in contenders["exact"].failed:
        row["exact_over_plain"] = _ratio(contenders["exact"].times(case), engine_s)["median"]
    if "transformers" in contenders:
        theirs = contenders["transformers"]
        if case in theirs.failed:
            row["transformers_failed"] = theirs.failed[case]
        else:
            row["transformers_ms"] = round(1e3 * median(theirs.times(case)), 3)
            ratio = _ratio(theirs.times(case), engine_s)
            row |= {"speedup": ratio["median"], "speedup_quartiles": ratio["quartiles"]}
    return row


def _shares(model: Model, case: Case, rates: Rates, step_s: float) -> dict[str, float]:
    """Return the step's shares of the device's bandwidth, matrix rate and roofline."""
    moving_s = read_bytes(model.config, case, model.dtype.itemsize) / rates.bytes_per_s
    computing_s = flops(model.config, case) / rates.flops_per_s
    return {
        "share_of_bandwidth": round(moving_s / step_s, 3),
        "share_of_matrix_rate": round(computing_s / step_s, 3),
        "over_roofline": round(step_s / max(moving_s, computing_s), 3),
    }


def _ratio(theirs: list[float], engine_s: list[float]) -> dict[str, Any]:
    """Return the median and the quartiles of the ratios of all rounds."""
    ratios = sorted(their / our for our, their in zip(engine_s, theirs, strict=True))
    quartiles = [round(ratios[len(ratios) * quarter // 4], 3) for quarter in (1, 3)]
    return {"median": round(median(ratios), 3), "quartiles": quartiles}


# --- Steps of `transformers`, on the same weights as the engine -----------------------------------


class TransformersSteps:
    """Single steps, each with a newly filled cache."""

    def __init__(self, model: Model) -> None:
        """Load the model.

        Raises:
            ImportError: `transformers` is not installed.
        """
        self._device, self._dtype = model.device, model.dtype
        self._model = model.transformers()

    @torch.inference_mode()
    def step_s(self, case: Case) -> float:
        """Run a forward pass with greedy tokens, and return its seconds."""
        cache = self._cache(case)
        ids = torch.ones(case.batch, case.tokens, dtype=torch.int64, device=self._device)
        first, end = case.context_tokens, case.context_tokens + case.tokens
        positions = torch.arange(first, end, device=self._device).expand(case.batch, -1)
        kept = 1 if case.name == "prefill" else 0

        def step() -> object:
            logits = self._model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=kept,
            ).logits
            return logits.argmax(-1).tolist()

        return elapsed_s(self._device, step)

    def _cache(self, case: Case) -> Any:
        from transformers import DynamicCache

        config = self._model.config
        cache = DynamicCache(config=config)
        if not case.context_tokens:
            return cache
        shape = (case.batch, config.num_key_value_heads, case.context_tokens, config.head_dim)
        for layer in range(config.num_hidden_layers):
            keys, values = (
                torch.randn(shape, dtype=self._dtype, device=self._device) for _ in range(2)
            )
            cache.update(keys, values, layer)
        return cache


def reason(error: Exception) -> str:
    """Return an error as a single line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
