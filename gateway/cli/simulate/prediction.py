"""How well the simulator predicts the engine: the same requests through both, on this machine.

    draftgate bench simulator --rate 2 --requests 60 --json OUT

Measures the profile of the shipped model as a worker runs it, sends an open loop of requests to the
real engine through the production dispatcher, then simulates exactly that: the same arrivals, token
ids and lengths, devices that do just what the profile says. Prints the errors of mean and P90 of TTFT
and TPOT. With a policy other than `off` the simulator replays recorded acceptance, not this run's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from backends.base import WorkerConfig
from backends.registry import backend_factory
from backends.shipped import SHIPPED_MODEL
from backends.sim.profile import load_profile
from backends.sim.simulated import World
from backends.tokenizer import Tokenizer
from gateway.cli.environment import collect_environment
from gateway.cli.simulate.cluster import Cluster, send, simulate, started
from gateway.cli.simulate.prompts import job_of
from gateway.dispatch import Job
from loadgen.figures import FIGURE, distribution, values_of
from loadgen.plan import Load, make_plan
from loadgen.types import Planned, Record
from loadgen.workloads import text_of

MEASURED: Final = (("ttft_s", "mean"), ("ttft_s", "p90"), ("tpot_s", "mean"), ("tpot_s", "p90"))
MAX_MODEL_LEN: Final = 2048
KV_BYTES: Final = 256 << 20
"""Room for 21 such sequences: more than a small load has at once."""

PROFILER: Final = "backends.engine.bench.serving_profile"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(prog="draftgate bench simulator", description=__doc__)
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--speculation", default="off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    load = Load(
        workload=args.workload,
        rate_rps=args.rate,
        requests=args.requests,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    result = predict(load, args.speculation)
    for row in result["results"]:
        print(row)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def predict(load: Load, speculation: str) -> dict[str, Any]:
    """Return what was measured, what was predicted, and the errors.

    Raises:
        ImportError: the engine is not installed.
        RuntimeError: the profile could not be measured.
    """
    planned = list(make_plan(load, max_model_len=MAX_MODEL_LEN).requests)
    to_job = _encoded(Tokenizer(SHIPPED_MODEL))
    config = WorkerConfig(
        speculation=speculation, proposer="ngram", max_model_len=MAX_MODEL_LEN, kv_bytes=KV_BYTES
    )
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory) / "measured.json"
        _measure_profile(profile)
        real = asyncio.run(_engine_run(config, planned, to_job))
        simulated = replace(config, profile=str(profile))
        world = World(load.seed, belief_error=0.0, roofline=False)
        predicted = simulate(Cluster(simulated, 1, "least-loaded", world), planned, to_job=to_job)
        source = load_profile(str(profile)).source
    return {
        "command": " ".join(["draftgate bench simulator", *sys.argv[2:]]),
        "environment": collect_environment(),
        "profile": source,
        "requests": len(planned),
        "rate_rps": load.rate_rps,
        "speculation": speculation,
        "results": compared(real, predicted),
    }


def compared(real: list[Record], predicted: list[Record]) -> list[dict[str, Any]]:
    """Return figure by figure what was measured and predicted, and the relative error."""
    rows = []
    for key, value in MEASURED:
        found, expected = (
            distribution(values_of(FIGURE[key], records)) for records in (real, predicted)
        )
        if found is None or expected is None:
            raise ValueError(f"no {key} was measured or predicted")
        measured, simulated = found.as_dict()[value], expected.as_dict()[value]
        error = simulated / measured - 1
        row = {"figure": f"{key}.{value}", "engine": measured, "simulator": simulated}
        rows.append({**row, "error": round(error, 4)})
    return rows


def _encoded(tokenizer: Tokenizer) -> Callable[[Planned], Job]:
    """Return what makes jobs with a tokenizer's ids, for both runs the same."""

    def to_job(planned: Planned) -> Job:
        ids = tuple(tokenizer.encode(text_of(planned.question)))
        room = MAX_MODEL_LEN - planned.question.max_tokens
        return replace(job_of(planned), prompts=(ids[-room:],))

    return to_job


def _measure_profile(path: Path) -> None:
    # A process of its own: the engine's thread must find torch as a server finds it.
    command = [sys.executable, "-m", PROFILER, "--json", str(path)]
    done = subprocess.run(command, check=False)  # noqa: S603 - our own module
    if done.returncode:
        raise RuntimeError(f"the profile could not be measured: {' '.join(command)}")


async def _engine_run(
    config: WorkerConfig, planned: list[Planned], to_job: Callable[[Planned], Job]
) -> list[Record]:
    jobs = {one.index: to_job(one) for one in planned}  # encoding takes the engine's time
    factory = backend_factory("engine")
    async with started(factory, config, 1, "least-loaded") as dispatcher:
        return await send(dispatcher, planned, lambda one: jobs[one.index])


if __name__ == "__main__":
    main()
