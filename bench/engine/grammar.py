"""What structured output costs and what its certain text earns, on random JSON schemas.

    python -m bench.engine.grammar --json bench/results/grammar.json

Three settings run the same requests, interleaved in alternating order: no speculation, drafts of
certain tokens alone, and these with n-grams. Their texts must be equal. Then the texts are parsed
again to time masks and what else a step asks of a grammar.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, TypeVar

from bench.engine.prompts import held_out_prompts
from bench.engine.record import provenance
from bench.engine.schemas import Schema, random_schemas
from draftgate.backends.base import WorkerConfig
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.engine.load import LoadedEngine, load_engine
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.token_ids import compact
from draftgate.backends.types import (
    FinishReason,
    GenerationRequest,
    GrammarKind,
    GrammarSpec,
    SamplingParams,
)
from draftgate.policies.types import SpeculationMode, SpeculationPlan

T = TypeVar("T")

MOST_TOKENS: Final = 200
BATCHES: Final = (1, 8)
TEMPERATURES: Final = (0.0, 0.8)
DRAFT_ROWS: Final = 4


def _plan(proposer: str | None, most: int) -> SpeculationPlan:
    return SpeculationPlan("bench", SpeculationMode.AUTO, proposer, most, "a measurement")


PLANS: Final = {"off": _plan(None, 0), "forced": _plan(None, 8), "ngram": _plan("ngram", 8)}


@dataclass
class Decoding:
    """Sums over the decode steps of one setting."""

    tokens: int = 0
    sequence_steps: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    completed: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)

    def summary(self, requests: int) -> dict[str, Any]:
        """Return the figures of a report."""
        return {
            "share_completed": round(self.completed / requests, 3),
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_step_and_sequence": round(self.tokens / self.sequence_steps, 3),
            "tokens_per_s": round(self.tokens / self.seconds, 1),
        }


def run(engine: LoadedEngine, requests: Sequence[GenerationRequest], sums: Decoding) -> None:
    """Run one batch; count the steps that only decode, planning included."""
    for request in requests:
        engine.worker.submit(request)
        sums.outputs[request.request_id] = []
    started_s = time.perf_counter()
    for step in run_until_idle(engine.worker, engine.executor):
        ended_s = time.perf_counter()
        if all(work.start >= work.sequence.prompt_tokens for work in step.plan.work):
            sums.seconds += ended_s - started_s
            sums.sequence_steps += len(step.plan.work)
            sums.tokens += sum(len(delta.token_ids) for _, delta in step.deltas)
        for request_id, delta in step.deltas:
            sums.outputs[request_id].extend(delta.token_ids)
            if delta.outcome is not None:
                sums.drafted += delta.outcome.num_drafted_tokens
                sums.accepted += delta.outcome.num_accepted_tokens
                sums.completed += delta.finish_reason is FinishReason.STOP
        started_s = time.perf_counter()


def decode(
    engine: LoadedEngine, specs: Sequence[GrammarSpec], batch: int, temperature: float
) -> dict[str, Decoding]:
    """Run all schemas under every plan, batch after batch, interleaved.

    Raises:
        RuntimeError: speculation changed a text.
    """
    prompts = held_out_prompts(engine.worker.tokenizer, len(specs), least=20, most=80)
    sums = {name: Decoding() for name in PLANS}
    for first in range(0, len(specs), batch):
        names = list(PLANS) if first // batch % 2 else list(reversed(PLANS))
        for name in names:
            requests = [
                GenerationRequest(
                    str(i),
                    compact(prompts[i]),
                    SamplingParams(MOST_TOKENS, i, temperature),
                    PLANS[name],
                    grammar=specs[i],
                )
                for i in range(first, min(first + batch, len(specs)))
            ]
            for request in requests:
                engine.worker.admission.check(request)  # compiles
            run(engine, requests, sums[name])
    if any(sums[name].outputs != sums["off"].outputs for name in PLANS):
        raise RuntimeError("speculation changed a text")
    return sums


def times(
    grammars: LlGrammars, specs: Sequence[GrammarSpec], outputs: dict[str, list[int]], eos: int
) -> dict[str, Any]:
    """Time each call along the texts; microseconds.

    Args:
        grammars: that have compiled nothing yet.
        specs: what the outputs were held to, by their number.
        outputs: the texts' tokens.
        eos: the token that ends them.
    """
    took: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., T], *args: Any) -> T:
        started_s = time.perf_counter()
        result = call(*args)
        took.setdefault(name, []).append((time.perf_counter() - started_s) * 1e6)
        return result

    grammars.start(GrammarSpec(GrammarKind.REGEX, "a"))  # reads the vocabulary
    for number, tokens in outputs.items():
        said = [token for token in tokens if token != eos]
        timed("compile", grammars.start, specs[int(number)])
        grammar = timed("start, compiled before", grammars.start, specs[int(number)])
        for place, token in enumerate(said):
            ahead = Draft(tuple(said[place : place + DRAFT_ROWS]))
            timed("mask", grammar.masks, Draft())
            timed("forced", grammar.forced, 8)
            if len(ahead) == DRAFT_ROWS:
                timed(f"masks, {DRAFT_ROWS} drafts", grammar.masks, ahead)
                timed(f"legal, {DRAFT_ROWS} drafts", grammar.legal, ahead.token_ids)
            timed("accept", grammar.accept, token)
    return {name: _spread(values) for name, values in took.items()}


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "calls": len(ordered),
        "mean_us": round(mean(ordered), 1),
        "p50_us": round(median(ordered), 1),
        "p99_us": round(ordered[int(0.99 * (len(ordered) - 1))], 1),
        "max_us": round(ordered[-1], 1),
    }


def _spec(schema: Schema) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def measure(count: int) -> dict[str, Any]:
    """Return the whole measurement."""
    facts = provenance()
    specs = [_spec(schema) for schema in random_schemas(count)]
    engine = load_engine(WorkerConfig(speculation="auto", threads=1))
    tokenizer = engine.worker.tokenizer
    eos = tokenizer.special_id("eos_token")
    assert eos is not None  # the shipped model's
    results, costs = [], {}
    for temperature in TEMPERATURES:
        for batch in BATCHES:
            sums = decode(engine, specs, batch, temperature)
            row = {name: each.summary(count) for name, each in sums.items()}
            results.append({"temperature": temperature, "batch": batch, **row})
            print(temperature, batch, row)
        fresh = LlGrammars(tokenizer, {eos})
        costs[str(temperature)] = times(fresh, specs, sums["off"].outputs, eos)
    return {
        **facts,
        "threads": 1,
        "numerics_class": engine.served.card.numerics_class,
        "schemas": count,
        "most_tokens": MOST_TOKENS,
        "vocab_size": tokenizer.vocab_size,
        "results": results,
        "times_at_temperature": costs,
    }


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    result = measure(args.schemas)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
