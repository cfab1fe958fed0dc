"""What does a cached prompt save? Seconds to the first token, cached against uncached.

    python -m bench.engine.prefix_cache --json bench/results/NAME.json

Each round runs a prompt twice on one worker as a tenant of its own: the first run computes it, the
second finds it. Their ratio within a round is what counts; the first tokens must be the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from bench.engine.record import provenance
from draftgate.backends.base import WorkerConfig
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.engine.load import LoadedEngine, load_engine
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.policies.speculation import Off
from draftgate.policies.types import RequestView
from training.corpus import held_out_files

PROMPT_TOKENS = (64, 256, 1024, 4096, 8000)
KV_BYTES = 256 << 20


def long_prompt(engine: LoadedEngine, tokens: int) -> tuple[int, ...]:
    """Return that many tokens of held-out source."""
    ids: list[int] = []
    for path in held_out_files():
        ids += engine.worker.tokenizer.encode(path.read_text(encoding="utf-8", errors="ignore"))
        if len(ids) >= tokens:
            break
    return tuple(ids[:tokens])


def first_token(engine: LoadedEngine, prompt: tuple[int, ...], tenant: str) -> dict[str, Any]:
    """Run a prompt for one token; return seconds of its steps, the token, and what was cached."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    plan = Off().decide(RequestView(len(prompt), 1, 0.0), engine.worker.load())
    engine.worker.submit(GenerationRequest(tenant, compact(prompt), sampling, plan, tenant=tenant))
    steps = list(run_until_idle(engine.worker, engine.executor))
    _, delta = steps[-1].deltas[-1]
    seconds = sum(step.result.step_s for step in steps)
    return {"s": seconds, "token": delta.token_ids[0], "cached_tokens": delta.cached_tokens}


def measure(rounds: int, model: str | None) -> dict[str, Any]:
    """Return the whole measurement."""
    facts = provenance()
    engine = load_engine(WorkerConfig(model=model, kv_bytes=KV_BYTES))
    # Memory is handed out when it is first used, in pages of 2 MiB: not what is to be measured.
    for index in range(8):
        first_token(engine, long_prompt(engine, PROMPT_TOKENS[-1]), f"unmeasured-{index}")
    rows = []
    for tokens in PROMPT_TOKENS:
        prompt = long_prompt(engine, tokens)
        pairs = []
        for index in range(rounds):
            cold = first_token(engine, prompt, f"{tokens}-{index}")
            warm = first_token(engine, prompt, f"{tokens}-{index}")
            assert cold["token"] == warm["token"], "a cached prompt must say the same"
            pairs.append((cold, warm))
        rows.append(
            {
                "prompt_tokens": tokens,
                "cached_tokens": pairs[0][1]["cached_tokens"],
                "uncached_ms": round(1e3 * median(cold["s"] for cold, _ in pairs), 3),
                "cached_ms": round(1e3 * median(warm["s"] for _, warm in pairs), 3),
                "ratios": [round(cold["s"] / warm["s"], 2) for cold, warm in pairs],
            }
        )
    return {**facts, "model": engine.served.card.root, "rounds": rounds, "results": rows}


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    result = measure(args.rounds, args.model)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
