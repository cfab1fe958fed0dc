"""Measure the error of the simulator's predictions of the engine on this machine.

    draftgate bench simulator --rate 2 --requests 60 --json OUT

The study sends an open loop of requests to the real engine through the production dispatcher. It
measures the profile of the shipped model in a worker before and after the requests. It then
simulates the same arrivals, token ids and lengths with each profile. The mean of both simulations
is the prediction. The difference between both simulations shows how quiet the machine was. With a
policy other than `off`, the simulator replays recorded acceptance, not the acceptance of this run.
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

from msgspec import structs

from bench.harness.provenance import command_line
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.registry import backend_factory
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.environment import collect_environment
from draftgate.gateway.cli.simulate.cluster import (
    SimulatedCluster,
    running_dispatcher,
    send,
    simulate,
)
from draftgate.gateway.cli.simulate.conversion import job_of
from draftgate.gateway.dispatch.job import Job
from draftgate.loadgen.measuring.metrics import METRICS, distribution, values_of
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.types import PlannedRequest, Record
from draftgate.loadgen.workloads.base import prompt_text

MEASURED: Final = (("ttft_s", "mean"), ("ttft_s", "p90"), ("tpot_s", "mean"), ("tpot_s", "p90"))
MAX_MODEL_LEN: Final = 2048
KV_BYTES: Final = 256 << 20
"""KV memory in bytes for 21 of these sequences, more than a small load uses."""

PROFILER: Final = "bench.engine.serving_profile"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench simulator`."""
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
    result = {"command": _command(arguments), **predict(load, args.speculation)}
    for row in result["results"]:
        print(row)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def predict(load: Load, speculation: str) -> dict[str, Any]:
    """Return the measurements, the predictions and the errors.

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
        profiles = [Path(directory) / name for name in ("before.json", "after.json")]
        _measure_profile(profiles[0])
        real = asyncio.run(_engine_run(config, planned, to_job))
        _measure_profile(profiles[1])
        predicted = [
            _simulated(structs.replace(config, profile=str(path)), load.seed, planned, to_job)
            for path in profiles
        ]
        sources = [load_profile(str(path)).source for path in profiles]
    return {
        "environment": collect_environment(),
        "profiles": [source.replace(directory, "TEMPORARY") for source in sources],
        "requests": len(planned),
        "rate_rps": load.rate_rps,
        "speculation": speculation,
        "results": compared(real, predicted),
    }


def compared(real: list[Record], predicted: list[list[Record]]) -> list[dict[str, Any]]:
    """Return each metric as measured and as predicted, with the relative error.

    Args:
        real: metrics of the engine.
        predicted: metrics of the simulator, by profile. `apart` is their relative range.
    """
    rows = []
    for key, value in MEASURED:
        measured, *guesses = (_figure(key, value, records) for records in (real, *predicted))
        guess = sum(guesses) / len(guesses)
        row = {"figure": f"{key}.{value}", "engine": measured, "simulator": guess}
        apart = max(guesses) / min(guesses) - 1
        rows.append({**row, "error": round(guess / measured - 1, 4), "apart": round(apart, 4)})
    return rows


def _figure(key: str, value: str, records: list[Record]) -> float:
    found = distribution(values_of(METRICS[key], records))
    if found is None:
        raise ValueError(f"{key} is missing, so it cannot be compared")
    return found.as_dict()[value]


def _simulated(
    config: WorkerConfig,
    seed: int,
    planned: list[PlannedRequest],
    to_job: Callable[[PlannedRequest], Job],
) -> list[Record]:
    environment = SimEnvironment(seed, belief_error=0.0, roofline=False)
    return simulate(SimulatedCluster(config, 1, environment), planned, to_job=to_job)


def _command(arguments: Sequence[str] | None) -> str:
    given = sys.argv[1:] if arguments is None else arguments
    return command_line("draftgate bench simulator", given)


def _encoded(tokenizer: Tokenizer) -> Callable[[PlannedRequest], Job]:
    """Return a function that makes jobs from token ids, identical for both runs."""

    def to_job(planned: PlannedRequest) -> Job:
        ids = compact(tokenizer.encode(prompt_text(planned.request)))
        room = MAX_MODEL_LEN - planned.request.max_tokens
        return replace(job_of(planned), prompts=(ids[-room:],))

    return to_job


def _measure_profile(path: Path) -> None:
    # The engine's thread has the torch settings of a server only in a separate process.
    command = [sys.executable, "-m", PROFILER, "--json", str(path)]
    done = subprocess.run(command, check=False)  # noqa: S603 - our own module
    if done.returncode:
        raise RuntimeError(f"the profile could not be measured: {' '.join(command)}")


async def _engine_run(
    config: WorkerConfig, planned: list[PlannedRequest], to_job: Callable[[PlannedRequest], Job]
) -> list[Record]:
    jobs = {
        one.index: to_job(one) for one in planned
    }  # encoding in this process would slow the engine down
    factory = backend_factory("engine")
    async with running_dispatcher(factory, [config]) as dispatcher:
        return await send(dispatcher, planned, lambda one: jobs[one.index])


if __name__ == "__main__":
    main()
