"""Measure how many drafts the first requests of a fresh worker waste.

    python -m bench.engine.first_requests MODEL --prompts FILE --json OUT

FILE has prompts as in `bench.engine.bound`. For each temperature and each round, a fresh worker
runs `REQUESTS` requests one after the other. The result has the drafted and accepted tokens of the
first 1, 4 and 16 of them. A further worker starts from the counts of an earlier one that has run
the same number of other requests. Costs are learned from CPU time, because the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Final

import torch

from bench.engine.bound import cpu_config, learn_costs_from, read_prompts
from bench.harness.provenance import provenance
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.token_ids import TokenIds
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView

REQUESTS: Final = 16
FIRST: Final = (1, 4, 16)

_runs = count()


def run(engine: LoadedEngine, prompts: list[TokenIds], sampling: SamplingParams) -> dict[str, Any]:
    """Run the prompts one after the other.

    Returns:
        Drafted and accepted tokens of the first requests, and the CPU seconds of all of them.
    """
    worker, tenant, policy = core_of(engine), f"run-{next(_runs)}", speculation_policy("auto")
    counts, started_s = [], time.thread_time()
    for index, prompt in enumerate(prompts):
        view = RequestView(len(prompt), sampling.max_tokens, sampling.temperature)
        plan = policy.decide(view, worker.load())
        own = replace(sampling, seed=index)
        request = GenerationRequest(f"{tenant}-{index}", prompt, own, plan, tenant=tenant)
        worker.submit(request, time.thread_time())
        for step in run_until_idle(worker, engine.executor, time.thread_time):
            for _, delta in step.deltas:
                if delta.outcome is not None:
                    outcome = delta.outcome
                    counts.append((outcome.num_drafted_tokens, outcome.num_accepted_tokens))
    drafted = list(accumulate(one for one, _ in counts))
    accepted = list(accumulate(one for _, one in counts))
    return {
        "drafted": {first: drafted[first - 1] for first in FIRST},
        "accepted": {first: accepted[first - 1] for first in FIRST},
        "cpu_s": round(time.thread_time() - started_s, 3),
    }


def core_of(engine: LoadedEngine) -> WorkerCore:
    """Return a worker that generates text."""
    assert isinstance(engine.worker, WorkerCore)
    return engine.worker


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--arm", default="fitted prior", help="name of the fresh workers")
    parser.add_argument("--temperatures", default="0,0.7,1.0")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    learn_costs_from(time.thread_time)
    torch.set_num_threads(1)
    config = cpu_config(options.model, 1)
    engine = load_engine(config)
    rows: list[dict[str, Any]] = []
    facts = {**provenance(), "numerics_class": engine.served.card.numerics_class}
    prompts: Iterator[TokenIds] = read_prompts(core_of(engine), options.prompts)
    rounds = [[next(prompts) for _ in range(REQUESTS)] for _ in range(options.rounds)]
    for temperature in map(float, options.temperatures.split(",")):
        sampling = SamplingParams(options.tokens, seed=0, temperature=temperature, ignore_eos=True)
        for number, own in enumerate(rounds):
            engine = load_engine(config)
            fresh = {"arm": options.arm, "temperature": temperature, "round": number}
            rows.append({**fresh, **run(engine, own, sampling)})
            earlier = core_of(engine).scores.counts()
            # The prompts of the next round are other ones.
            engine, later = load_engine(config), rounds[(number + 1) % len(rounds)]
            core_of(engine).scores.restore(earlier)
            rows.append({**fresh, "arm": "after a restart", **run(engine, later, sampling)})
            for row in rows[-2:]:
                print(row, flush=True)
            options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
