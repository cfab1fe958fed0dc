"""Place OPT-13B on up to four A100, the reference case of DistServe's simulator.

    draftgate bench distserve --times profiler-a100-80g.distserve.json --trace SHAREGPT --json OUT

DistServe (Zhong et al., OSDI 2024) separates prompts from outputs. 90% of the requests must have a
TTFT of 200 ms and a TPOT of 100 ms. Its best deployment has two tensor-parallel GPUs for prompts
and one for outputs, with 1.56 requests/s per GPU. The study measures this deployment with each
batching policy and each seed, and searches all deployments of up to four GPUs with `slack`.

DistServe computes whole prompts in order of arrival, as `prefill_first` does. With either policy,
requests are in order of arrival, because all have the same targets.

Step times are fitted to DistServe's coefficients. The trace gives the shape of the lengths, which
are scaled to the means of the paper (755 and 200 tokens). Prompts are cut so that no request has
more than 2,048 tokens.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from msgspec import structs

from bench.harness.provenance import bench_parser, simulated_provenance
from bench.harness.study import running_study
from draftgate.lab.plan.answer import search_as_json
from draftgate.lab.plan.goodput import PLACEMENT
from draftgate.lab.plan.machines import CONFIG, MachineTypes
from draftgate.lab.plan.planner import Planner, link_of, targets_of
from draftgate.lab.plan.sources import TraceSource
from draftgate.lab.planning.best_deployment import Measured, Report
from draftgate.lab.planning.deployments import Budget, Deployment, Group, deployments
from draftgate.loadgen.planning.traces import TraceRow, read_trace
from draftgate.loadgen.types import Slo
from draftgate.policies.registry import batching_policy
from draftgate.policies.types import Role

MODEL: Final = "facebook/opt-13b"
SIZES: Final = (1, 2, 4)
KV_TOKENS: Final = {1: 66_144, 2: 163_008, 4: 356_736}
"""Tokens of the KV memory by GPUs of a group, from DistServe's `max_num_tokens.csv`."""

KV_TOKEN_BYTES: Final = 2 * 2 * 40 * 40 * 128
"""Bytes of a token: keys and values in float16 of 40 layers with 40 heads of 128."""

GPU_USD: Final = 2.21
HOST_S: Final = 2e-3
"""Time of the host per step, as in DistServe's simulator."""

TTFT_MS, TPOT_MS, SHARE = 200.0, 100.0, 0.9
MEANS: Final = (755.0, 200.0)
MOST_TOKENS: Final = 2048
ROUNDS: Final = 20
"""Corrections of the factors of lengths. Ten are enough for means within 0.1%."""

PAPER_RPS: Final = 1.56
"""Requests per second and GPU of DistServe's best deployment, by its simulator."""

BATCHING: Final = ("slack", "prefill_first")
"""Draftgate's batching policy, and that of DistServe."""

DECODES: Final = 95
"""Largest batch of the coefficients for small batches. Prompts of `PROMPT` tokens and more follow
the coefficients of prompts, and the table between them is interpolated."""

PROMPT: Final = 256


def profile(coefficients: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Return a `profile/2` that is fitted to DistServe's coefficients, which are in ms."""
    first, token, square = coefficients["prefill"]
    alone, context, sequence = coefficients["decoding_smallbs"]
    buckets = (1, 2, 4, *range(8, MOST_TOKENS + 1, 8))
    known = [1, DECODES, PROMPT, MOST_TOKENS]
    times = [alone + sequence * n for n in known[:2]] + [first + token * n for n in known[2:]]
    table = np.interp(buckets, known, times)
    return {
        "format": "profile/2",
        "device": f"{gpus} x NVIDIA A100 80GB",
        "model": "OPT-13B",
        "dtype": "float16",
        "source": "fitted to DistServe's profiler-a100-80g.distserve.json (82831f1)",
        "token_buckets": buckets,
        "step_s": (table / 1e3).tolist(),
        "kv_token_s": context / 1e3,
        "sequence_s": 0.0,
        "prefill_attention_s": 2.0 * square / 1e3,
        "host": {"step_s": HOST_S},
        "kv_token_bytes": KV_TOKEN_BYTES,
        "kv_bytes": KV_TOKENS[gpus] * KV_TOKEN_BYTES,
        "price_per_hour_usd": gpus * GPU_USD,
    }


def scaled(rows: Sequence[TraceRow]) -> tuple[TraceRow, ...]:
    """Return rows with the means of the paper.

    Prompts are cut to the context. The factors are those with which the means are right after that,
    because cut prompts are shorter than the trace's.
    """
    given = np.array([(row.prompt_tokens, row.output_tokens) for row in rows], dtype=float)
    factors = np.ones(2)
    for _ in range(ROUNDS):
        prompts, outputs = np.maximum(np.rint(given * factors), 1.0).T
        outputs = np.minimum(outputs, MOST_TOKENS - 1)
        prompts = np.minimum(prompts, MOST_TOKENS - outputs)
        factors *= MEANS / np.array((prompts.mean(), outputs.mean()))
    return tuple(
        replace(row, prompt_tokens=int(prompt), output_tokens=int(output))
        for row, prompt, output in zip(rows, prompts, outputs, strict=True)
    )


def per_gpu(found: Measured, gpus: Mapping[str, int]) -> dict[str, Any]:
    """Return the goodput of a deployment by GPU, with its interval."""
    count = found.candidate.deployment.total(gpus)
    rates = (found.rate_rps, found.low_rps, found.high_rps)
    keys = ("goodput_per_gpu", "low_per_gpu", "high_per_gpu")
    return {
        "deployment": str(found.candidate.deployment),
        "gpus": count,
        **{
            key: None if rate is None or rate == float("inf") else round(rate / count, 3)
            for key, rate in zip(keys, rates, strict=True)
        },
        "converged": found.converged,
    }


def cpu_s() -> float:
    """Return the CPU time of this process and of its ended children, in seconds."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench distserve`."""
    parser = bench_parser("distserve", __doc__)
    parser.add_argument("--times", type=Path, required=True, help="DistServe's coefficients")
    parser.add_argument("--trace", type=Path, required=True, help="lengths of ShareGPT")
    parser.add_argument("--precision", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--batching",
        default=",".join(BATCHING),
        help="batching policies of DistServe's deployment (default: %(default)s)",
    )
    parser.add_argument(
        "--no-search", dest="search", action="store_false", help="measure only this deployment"
    )
    args = parser.parse_args(arguments)
    facts = simulated_provenance("distserve", arguments)
    coefficients = json.loads(args.times.read_text(encoding="utf-8"))[MODEL]
    targets = targets_of(TTFT_MS, TPOT_MS, SHARE)
    policies = [batching_policy(name).name for name in args.batching.split(",")]
    source = TraceSource(scaled(read_trace(args.trace)), Slo.of_ms(TTFT_MS, TPOT_MS))
    with TemporaryDirectory() as folder:
        names = []
        for gpus in SIZES:
            file = Path(folder, f"a100x{gpus}.json")
            file.write_text(json.dumps(profile(coefficients[str(gpus)], gpus)), encoding="utf-8")
            names.append(str(file))
        machines = MachineTypes.load(",".join(names))
        gpus_of = {Path(name).stem: gpus for name, gpus in zip(names, SIZES, strict=True)}

        def planner(seed: int, batching: str = BATCHING[0]) -> Planner:
            found = Planner.for_source(
                machines,
                source,
                targets,
                link=link_of(None),
                phases=PLACEMENT,
                precision=args.precision,
                seed=seed,
            )
            config = structs.replace(CONFIG, batching=batching)
            return replace(found, simulation=replace(found.simulation, config=config))

        results: dict[str, Any] = {
            "format": "distserve/1",
            **facts,
            "settings": {
                "ttft_ms": TTFT_MS,
                "tpot_ms": TPOT_MS,
                "share": SHARE,
                "precision": args.precision,
                "means": MEANS,
            },
            "paper_per_gpu": PAPER_RPS,
            "apart": [],
            "search": None,
        }
        paper = Deployment((Group("a100x2", Role.PREFILL, 1), Group("a100x1", Role.DECODE, 1)))
        rows = [(batching, 1000 * n) for batching in policies for n in range(args.seeds)]
        with running_study(args.json, results, "deployments") as progress:
            for done, (batching, seed) in enumerate(rows, 1):
                one = planner(seed, batching)
                found = one.measure(one.candidate(paper, paper.total(machines.prices)))
                row = {"batching": batching, "seed": seed, **per_gpu(found, gpus_of)}
                results["apart"].append(row)
                print(row, f"DistServe: {PAPER_RPS}", flush=True)
                progress.report("DistServe's, by batching and seed", done, len(rows))
            if args.search:
                results["search"] = searched(planner(0), gpus_of, progress.report)


def searched(planner: Planner, gpus: Mapping[str, int], report: Report) -> dict[str, Any]:
    """Return the search for the best deployment of at most four GPUs.

    Raises:
        KeyboardInterrupt: the search was interrupted.
    """
    began_s, machines = cpu_s(), planner.machines
    budget = Budget({name: float(count) for name, count in gpus.items()}, 4.0)
    every = list(deployments(machines.names, [budget], 4))
    search = planner.search(planner.candidates(every, machines.prices), len(every), report)
    if search.interrupted:
        raise KeyboardInterrupt
    assert search.best is not None
    best, used_s = per_gpu(search.best, gpus), cpu_s() - began_s
    print(best, f"{len(every)} deployments in {used_s:.0f} s of CPU time")
    return {
        "deployments": len(every),
        "cpu_s": round(used_s, 1),
        "best": best,
        **search_as_json(search),
    }


if __name__ == "__main__":
    main()
