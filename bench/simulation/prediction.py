"""Measure the error of the simulator's predictions of the engine, by proposer and batch size.

    draftgate bench simulator --json OUT

For each proposer and batch size, the study sends bursts of requests to the real engine through the
production dispatcher. It measures the profile of the shipped model in a worker before and after the
requests. It then simulates the same bursts, token ids and lengths with each profile. The mean of
both simulations is the prediction. The difference between both simulations shows how quiet the
machine was.

With a proposer, the policy is `fixed:4`. The simulator replays recorded acceptance, not the
acceptance of this run, and `tokens_per_chunk` shows how far both differ. The time of a step does
not depend on this, and a chunk gap is the time of a step.

The study takes less than five minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from bench.harness.profiles import measure_profiles
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

MEASURED: Final = (
    ("ttft_s", "mean"), ("chunk_gap_s", "mean"), ("chunk_gap_s", "p90"),
    ("tokens_per_chunk", "mean"),
)  # fmt: skip
NO_PROPOSER: Final = "off"
POLICY: Final = "fixed:4"
MAX_MODEL_LEN: Final = 2048
KV_BYTES: Final = 256 << 20
"""KV memory in bytes for 21 of these sequences."""

MOST_BATCH: Final = 21


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench simulator`."""
    parser = argparse.ArgumentParser(prog="draftgate bench simulator", description=__doc__)
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--proposers", default=f"{NO_PROPOSER},ngram,draft_model")
    parser.add_argument("--batches", default="1,4,16", help=f"at most {MOST_BATCH} each")
    parser.add_argument("--rounds", type=int, default=3, help="number of bursts of each batch")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    batches = tuple(map(int, args.batches.split(",")))
    if max(batches) > MOST_BATCH:
        parser.error(f"--batches: at most {MOST_BATCH} sequences fit the KV memory")
    load = Load(
        workload=args.workload,
        rate_rps=1.0,  # the bursts replace the arrival times
        requests=args.rounds * max(batches),
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    result = {
        "command": _command(arguments),
        **predict(load, args.proposers.split(","), batches, args.rounds),
    }
    for row in result["results"]:
        print(row)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def predict(
    load: Load, proposers: Sequence[str], batches: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Return the measurements, the predictions and the errors.

    Args:
        load: at least as many requests as the bursts of the largest batch contain.
        rounds: number of bursts of each batch.

    Raises:
        ImportError: the engine is not installed.
        RuntimeError: the profile could not be measured.
    """
    planned = [
        replace(one, at_s=0.0) for one in make_plan(load, max_model_len=MAX_MODEL_LEN).requests
    ]
    bursts = {
        batch: [planned[batch * turn : batch * (turn + 1)] for turn in range(rounds)]
        for batch in batches
    }
    to_job = _encoded(Tokenizer(SHIPPED_MODEL))
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        profiles = [Path(directory) / name for name in ("before.json", "after.json")]
        measure_profiles({profiles[0]: None})
        real = {
            proposer: asyncio.run(_engine_run(_config(proposer), bursts, to_job))
            for proposer in proposers
        }
        measure_profiles({profiles[1]: None})
        for proposer, batch in product(proposers, batches):
            config = _config(proposer)
            predicted = [
                _simulated(structs.replace(config, profile=str(path)), bursts[batch], to_job)
                for path in profiles
            ]
            rows += [
                {"proposer": proposer, "batch": batch, **row}
                for row in compared(real[proposer][batch], predicted)
            ]
        sources = [load_profile(str(path)).source for path in profiles]
    return {
        "environment": collect_environment(),
        "profiles": [source.replace(directory, "TEMPORARY") for source in sources],
        "rounds": rounds,
        "policy": POLICY,
        "results": rows,
    }


def _config(proposer: str) -> WorkerConfig:
    drafts = proposer != NO_PROPOSER
    return WorkerConfig(
        speculation=POLICY if drafts else "off",
        proposer=proposer if drafts else "ngram",
        max_model_len=MAX_MODEL_LEN,
        kv_bytes=KV_BYTES,
    )


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
    bursts: list[list[PlannedRequest]],
    to_job: Callable[[PlannedRequest], Job],
) -> list[Record]:
    """Return the records of simulated bursts, each on an idle worker."""
    records = []
    for burst in bursts:
        environment = SimEnvironment(belief_error=0.0, roofline=False)
        records += simulate(SimulatedCluster(config, 1, environment), burst, to_job=to_job)
    return records


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


async def _engine_run(
    config: WorkerConfig,
    bursts: dict[int, list[list[PlannedRequest]]],
    to_job: Callable[[PlannedRequest], Job],
) -> dict[int, list[Record]]:
    """Return the records of the engine by batch size."""
    # Encoding during the run would slow the engine down.
    jobs = {one.index: to_job(one) for turns in bursts.values() for burst in turns for one in burst}
    factory = backend_factory("engine")
    async with running_dispatcher(factory, [config]) as dispatcher:
        records: dict[int, list[Record]] = {batch: [] for batch in bursts}
        for batch, turns in bursts.items():
            for burst in turns:
                records[batch] += await send(dispatcher, burst, lambda one: jobs[one.index])
        return records


if __name__ == "__main__":
    main()
