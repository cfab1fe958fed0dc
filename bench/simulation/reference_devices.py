"""Fit profiles of the machines in DistServe and Splitwise to their published measurements.

    python -m bench.simulation.reference_devices DISTSERVE_DATA SPLITWISE_DATA

The arguments are folders with `profiler-a100-80g.distserve.json` and `max_num_tokens.csv` of
DistServe (arXiv 2401.09670), and with `perf_model.csv` of splitwise-sim (arXiv 2311.18677). The
command writes files into `bench/simulation/devices` and prints the errors of the fits.

Neither source measured steps with both prompts and decodes. In these profiles, a decode token in
such a step takes as long as a prompt token.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from draftgate.policies.costs.step_cost import StepCost

DEVICES: Final = Path(__file__).with_name("devices")

STEP_TOKENS: Final = 2048
"""Tokens of the longest step, as in Splitwise. Longer prompts are computed in chunks."""

BUCKETS: Final = (*range(1, 129), *range(160, STEP_TOKENS + 1, 32))
"""Buckets of the tables. The short ones are exact, because a decode has one token per sequence."""

PROMPTS: Final = (128, 256, 512, 1024, 2048)
"""Prompts, in tokens, whose times the tables contain."""

LARGE_BATCH: Final = 95
"""Sequences from which DistServe's own fit of decodes has another slope, which is not used here."""

OUTPUT: Final = 128
"""Output tokens of each measurement of splitwise-sim."""

COUNTED: Final = 128
"""Tokens of its shortest prompt."""

LEAST_BATCH: Final = 4
"""Batch from which decodes of splitwise-sim are slower than noise."""

BANDWIDTH_SHARE: Final = 0.8
"""Share of the peak memory bandwidth at which decodes read the KV cache. The value is assumed."""

BY_COUNT: Final = "-by-count"
"""Suffix of the profiles with the decode times of splitwise-sim's own simulator (`count_fit`)."""

OPT, LLAMA = "facebook/opt-13b", "llama2-70b"

OPT_KV_BYTES: Final = 40 * 2 * 5120 * 2
LLAMA_KV_BYTES: Final = 80 * 2 * 8 * 128 * 2
"""Bytes per token: layers x (key and value) x width x 2. Llama-2-70B has 8 KV heads."""

LLAMA_KV_MEMORY: Final = round(0.9 * 640e9 - 138e9)


HOST_S: Final = 0.002
"""Seconds of the host in each step, as in DistServe's simulator."""

A100_PRICE, H100_PRICE = 2.21, 4.76
"""USD per hour of a GPU, as in the figures of splitwise-sim (notebooks/utils.py)."""


def profile_file(profile: str) -> str:
    """Return the file of a profile."""
    return str(DEVICES / f"{profile}.json")


class Machine(NamedTuple):
    """A machine with 8 GPUs in splitwise-sim. A unit of power in its notebooks counts as 100 W."""

    name: str
    price_per_hour_usd: float
    power_w: float
    bytes_per_s: float


MACHINES: Final = {
    "a100-80gb": Machine("llama-2-70b-a100-tp8", round(8 * A100_PRICE, 2), 2480.0, 2.039e12),
    "h100-80gb": Machine("llama-2-70b-h100-tp8", round(8 * H100_PRICE, 2), 4400.0, 3.35e12),
}
"""The bandwidth of a GPU's memory is that of its data sheet (SXM)."""


class Sample(NamedTuple):
    """The time of a prompt of `tokens`, or of a decode step with a batch and a mean context."""

    seconds: float
    tokens: int = 0
    batch: int = 0
    context: int = 0

    def predicted_s(self, cost: StepCost) -> float:
        """Return the time that a profile predicts."""
        if not self.tokens:
            return cost.seconds(self.batch, self.batch * self.context, self.batch)
        return sum(
            _chunk_s(cost, start, min(STEP_TOKENS, self.tokens - start))
            for start in range(0, self.tokens, STEP_TOKENS)
        )


def _chunk_s(cost: StepCost, start: int, tokens: int) -> float:
    pairs = (tokens - 1) * start + tokens * (tokens + 1) // 2 - 1
    return cost.seconds(tokens, start + tokens, 1) + cost.pair_s * pairs


class Fit(NamedTuple):
    """Step costs, and the samples that they approximate."""

    cost: StepCost
    samples: Sequence[Sample]

    @property
    def errors(self) -> str:
        """The mean and the largest relative error, separately for prompts and decodes."""
        parts = []
        for name, kept in (
            ("prompts", [one for one in self.samples if one.tokens]),
            ("decodes", [one for one in self.samples if not one.tokens]),
        ):
            off = [abs(one.predicted_s(self.cost) / one.seconds - 1.0) for one in kept]
            parts.append(f"{name} {np.mean(off):.1%} in the mean and at most {max(off):.1%}")
        return ", ".join(parts)


def distserve_fit(coefficients: Mapping[str, Sequence[float]]) -> Fit:
    """Return step costs that follow DistServe's formulas for one device.

    Prompts take `a + b tokens + c tokens^2` ms, and decodes `a + b context + c batch` ms. The table
    follows the decodes up to 94 tokens and the prompts from 128 tokens on.
    """
    first, per_token, per_square = (1e-3 * one for one in coefficients["prefill"])
    small = [1e-3 * one for one in coefficients["decoding_smallbs"]]
    large = [1e-3 * one for one in coefficients["decoding_largebs"]]
    base, kv_token_s, per_sequence = small
    knots = [(batch, base + per_sequence * batch) for batch in (1, LARGE_BATCH - 1)]
    knots += [(n, first + (per_token - kv_token_s) * n) for n in PROMPTS]
    cost = StepCost(BUCKETS, _table(knots), kv_token_s, 0.0, 2.0 * per_square)
    samples = [Sample(first + per_token * n + per_square * n * n, tokens=n) for n in (64, *PROMPTS)]
    for batch in (1, 8, 32, 64, 94, 128, 192, 256):
        start_s, kv_s, sequence_s = large if batch >= LARGE_BATCH else small
        for context in (256, 800, 1600):
            step_s = start_s + kv_s * batch * context + sequence_s * batch
            samples.append(Sample(step_s, batch=batch, context=context))
    return Fit(cost, samples)


def splitwise_fit(samples: Sequence[Sample], kv_token_s: float) -> Fit:
    """Return step costs that agree with the measured prompts and decode batches of splitwise-sim.

    Args:
        samples: medians of single prompts, and of decodes with different batches.
        kv_token_s: seconds to read the KV of a token, which the measurements do not determine. They
            vary the context of single sequences only.
    """
    prompts = {one.tokens: one.seconds for one in samples if one.tokens}
    decodes = defaultdict[int, list[float]](list)
    for one in samples:
        if one.batch:
            decodes[one.batch].append(one.seconds - kv_token_s * one.batch * one.context)
    batches = [(batch, median(times)) for batch, times in sorted(decodes.items())]
    # The table must not fall, so a sequence costs at most the smallest slope of the decodes.
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(batches) if a[0] >= LEAST_BATCH]
    sequence_s = min(slopes)
    pair_s = _pair_s(prompts, kv_token_s)
    knots = [(batch, seconds - sequence_s * batch) for batch, seconds in batches]
    knots += [(n, prompts[n] - sequence_s - kv_token_s * n - pair_s * n * n / 2) for n in PROMPTS]
    return Fit(StepCost(BUCKETS, _table(knots), kv_token_s, sequence_s, pair_s), samples)


def count_fit(samples: Sequence[Sample]) -> Fit:
    """Return step costs with the decode times that splitwise-sim itself uses.

    Its simulator reads the time of a batch of n decodes where its table has the decodes after one
    prompt of n tokens. The table begins at 128 tokens, so it extrapolates. The time then hardly
    depends on the batch. Batches of `COUNTED` sequences and more get the time of a prompt here.
    """
    prompts = {one.tokens: one.seconds for one in samples if one.tokens}
    alone = sorted((one.context - OUTPUT // 2, one.seconds) for one in samples if one.batch == 1)
    (first, first_s), (second, second_s) = alone[:2]
    slope_s = (second_s - first_s) / (second - first)
    knots = [(batch, first_s + slope_s * (batch - first)) for batch in (1, COUNTED - 1)]
    pair_s = _pair_s(prompts, 0.0)
    knots += [(n, prompts[n] - pair_s * n * n / 2) for n in PROMPTS]
    return Fit(StepCost(BUCKETS, _table(knots), 0.0, 0.0, pair_s), samples)


def _pair_s(prompts: Mapping[int, float], kv_token_s: float) -> float:
    """Return the seconds per pair that explain prompts of several chunks, by least squares."""
    values, factors = [], []
    for tokens in (one for one in prompts if one > STEP_TOKENS):
        chunks = tokens // STEP_TOKENS
        pairs = (tokens**2 - chunks * STEP_TOKENS**2) / 2
        reads_s = kv_token_s * STEP_TOKENS * (chunks * (chunks + 1) / 2 - chunks)
        values.append((prompts[tokens] - chunks * prompts[STEP_TOKENS] - reads_s) / prompts[tokens])
        factors.append(pairs / prompts[tokens])
    return float(np.dot(factors, values) / np.dot(factors, factors))


def _table(knots: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Return the times of `BUCKETS` on straight lines between knots, which never fall.

    Neighbouring knots that fall get their mean, which is the least-squares fit (pool adjacent
    violators).
    """
    pools: list[tuple[float, int]] = []
    for _, seconds in knots:
        pools.append((seconds, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one_s, ones), (other_s, others) = pools[-2:]
            both = ones + others
            pools[-2:] = [((one_s * ones + other_s * others) / both, both)]
    rising = [seconds for seconds, count in pools for _ in range(count)]
    table = np.interp(BUCKETS, [tokens for tokens, _ in knots], rising)
    return tuple(round(float(one), 7) for one in table)


def _distserve(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    fits = json.loads((folder / "profiler-a100-80g.distserve.json").read_text())[OPT]
    with (folder / "max_num_tokens.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == OPT and row["pp"] == "1"]
    kv_tokens = {row["tp"]: int(row["max_num_tokens"]) for row in rows}
    for tensor, coefficients in fits.items():
        fit = distserve_fit(coefficients)
        source = (
            "fitted to DistServe's profiler-a100-80g.distserve.json and max_num_tokens.csv"
            f" (LLMServe/DistServe 82831f1), with errors of {fit.errors}. As in its simulator, the"
            " host takes 2 ms per step. The price is that of splitwise-sim."
        )
        yield (
            f"opt-13b-a100-tp{tensor}",
            {
                **_file(fit.cost, f"{tensor} x NVIDIA A100 80GB", "OPT-13B", source),
                "host": {"step_s": HOST_S},
                "kv_token_bytes": OPT_KV_BYTES,
                "kv_bytes": kv_tokens[tensor] * OPT_KV_BYTES,
                "price_per_hour_usd": round(int(tensor) * A100_PRICE, 2),
            },
        )


def _splitwise(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for hardware, machine in MACHINES.items():
        samples = _medians(folder / "perf_model.csv", hardware)
        kv_token_s = LLAMA_KV_BYTES / (8 * BANDWIDTH_SHARE * machine.bytes_per_s)
        derived = (
            f" kv_token_s is derived: {LLAMA_KV_BYTES:,} bytes per token (grouped queries) at 80%"
            f" of 8 x {machine.bytes_per_s / 1e12:g} TB/s."
        )
        counted = " Decode times are those of its simulator, which hardly depend on the batch."
        for name, fit, words in (
            (machine.name, splitwise_fit(samples, kv_token_s), derived),
            (f"{machine.name}{BY_COUNT}", count_fit(samples), counted),
        ):
            source = (
                "fitted to the medians of splitwise-sim's perf_model.csv (Mutinifni/splitwise-sim"
                f" 8f99e7d), {LLAMA}, {hardware}, tensor_parallel 8, with errors of {fit.errors}."
                f"{words} kv_bytes is 90% of the memory less 138 GB of weights. Price and power are"
                " those of splitwise-sim's notebooks, where a unit of power counts as 100 W."
            )
            yield (
                name,
                {
                    **_file(fit.cost, f"8 x {hardware}", "Llama-2-70B", source),
                    "kv_token_bytes": LLAMA_KV_BYTES,
                    "kv_bytes": LLAMA_KV_MEMORY,
                    "price_per_hour_usd": machine.price_per_hour_usd,
                    "power_w": machine.power_w,
                },
            )


def _file(cost: StepCost, device: str, model: str, source: str) -> dict[str, Any]:
    return {
        "format": "profile/2",
        "device": device,
        "model": model,
        "dtype": "float16",
        "source": source,
        "token_buckets": cost.token_buckets,
        "step_s": cost.step_s,
        "kv_token_s": cost.kv_token_s,
        "sequence_s": cost.sequence_s,
        "prefill_attention_s": cost.pair_s,
    }


def _medians(path: Path, hardware: str) -> list[Sample]:
    """Return the median prompts of one request, and the median decode steps by batch and context.

    Prompts of several requests are left out, because a step has at most `STEP_TOKENS` tokens.
    """
    prompts, decodes = defaultdict[int, list[float]](list), defaultdict[Any, list[float]](list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"], row["tensor_parallel"]) != (LLAMA, hardware, "8"):
                continue
            tokens, batch = int(row["prompt_size"]), int(row["batch_size"])
            context = tokens + int(row["token_size"]) // 2
            if batch == 1:
                prompts[tokens].append(1e-3 * float(row["prompt_time"]))
            decodes[batch, context].append(1e-3 * float(row["token_time"]))
    return [
        *(Sample(median(times), tokens=tokens) for tokens, times in sorted(prompts.items())),
        *(Sample(median(times), 0, *key) for key, times in sorted(decodes.items())),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write all profiles."""
    distserve, splitwise = map(Path, sys.argv[1:] if arguments is None else arguments)
    for name, profile in (*_distserve(distserve), *_splitwise(splitwise)):
        path = DEVICES / f"{name}.json"
        path.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
        print(path.name, profile["source"])


if __name__ == "__main__":
    main()
