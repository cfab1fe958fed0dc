"""The host time of n-gram lookups per sequence, in C and in Python.

Each sequence continues a held-out file. In each step its text grows by the tokens of that file, and
both proposers draft for the whole batch. The proposers alternate in one run, so that a busy machine
slows both.
"""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any, Final

from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.policies.types import SpeculationMode, SpeculationPlan
from training.corpus import held_out_files

BATCHES: Final = (1, 16, 64, 256)
CONTEXTS: Final = (512, 4096)
SLOTS: Final = 8
STEPS: Final = 60
TOKENS_PER_STEP: Final = 2
"""Tokens that a text grows by in a step, about the mean with n-gram drafts."""

PLAN: Final = SpeculationPlan("bench", SpeculationMode.NGRAM, "ngram", SLOTS, "a benchmark")


def measure_lookups(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the microseconds per sequence for each batch size and context length."""
    text = held_out_tokens(tokenizer, 16 * (max(CONTEXTS) + STEPS * TOKENS_PER_STEP))
    rows = []
    for context in CONTEXTS:
        for batch in BATCHES:
            rows.append({"context_tokens": context, **_measure_batch(text, context, batch)})
            print(rows[-1], flush=True)
    return rows


def held_out_tokens(tokenizer: Tokenizer, least: int) -> list[int]:
    """Return at least this many tokens of held-out files, or fewer if the files contain fewer."""
    files = list(held_out_files())
    random.Random(2).shuffle(files)
    tokens: list[int] = []
    while files and len(tokens) < least:
        tokens += tokenizer.encode(files.pop().read_text(encoding="utf-8", errors="ignore"))
    return tokens


def _measure_batch(text: list[int], context: int, batch: int) -> dict[str, Any]:
    proposers = {"c": NgramProposer(), "python": NgramProposer(native=False)}
    taken_s: dict[str, list[float]] = {name: [] for name in proposers}
    span = context + STEPS * TOKENS_PER_STEP
    starts = [number * (len(text) - span) // batch for number in range(batch)]
    sequences = [
        _sequence(number, text[start : start + context]) for number, start in enumerate(starts)
    ]
    requests = [DraftRequest(sequence, SLOTS) for sequence in sequences]
    drafted = 0
    for step in range(STEPS):
        drafts = {}
        for name, proposer in proposers.items():
            started_s = time.thread_time()
            drafts[name] = proposer.propose(requests)
            taken_s[name].append((time.thread_time() - started_s) / batch)
        assert drafts["c"] == drafts["python"]
        drafted += sum(map(bool, drafts["c"]))
        for sequence, start in zip(sequences, starts, strict=True):
            begin = start + context + step * TOKENS_PER_STEP
            sequence.token_ids.extend(text[begin : begin + TOKENS_PER_STEP])
    c, python = taken_s["c"], taken_s["python"]
    return {
        "sequences": batch,
        "found_share": round(drafted / (STEPS * batch), 3),
        "c_us": _microseconds(c[1:]),
        "python_us": _microseconds(python[1:]),
        "ratio": round(median(b / a for a, b in zip(c[1:], python[1:], strict=True)), 1),
        "index_prompt_us": {"c": round(1e6 * c[0], 1), "python": round(1e6 * python[0], 1)},
    }


def _microseconds(seconds: list[float]) -> dict[str, float]:
    """Return the lowest decile and the median of the steps, per sequence."""
    ordered = sorted(seconds)
    lowest, middle = ordered[len(ordered) // 10], median(ordered)
    return {"p10": round(1e6 * lowest, 2), "median": round(1e6 * middle, 2)}


def _sequence(key: int, tokens: list[int]) -> Sequence:
    sampling = SamplingParams(STEPS * TOKENS_PER_STEP, key)
    request = GenerationRequest(str(key), compact(tokens), sampling, PLAN)
    return Sequence.for_choice(key, request, ResumedChoice(0, ()))
