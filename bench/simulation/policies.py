"""Compare speculation policies from an idle worker to a saturated worker, by workload.

    draftgate bench policies --json OUT
    draftgate bench policies --attribute --json OUT

The study simulates a single worker. Rates are fractions of its throughput without speculation when
all requests arrive simultaneously. All policies get the same requests, texts and noise for each
seed, so differences are paired. Policies start with cost estimates that are 30% off.

With `--attribute`, variants of `auto` that know one or more true values (`sim.oracle.Knowledge`)
take the place of the baselines, so the difference to the oracle has names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.harness.provenance import bench_parser, simulated_provenance
from bench.harness.study import running_study
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.sim.recording import Recording, load_recording
from draftgate.lab.simulate.experiment import ExperimentOutcome, Setup, run_experiment
from draftgate.lab.simulate.intervals import differences, estimate
from draftgate.lab.simulate.report import compared, estimates
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.types import Slo

SERVICE_LEVELS: Final = {
    "code": Slo(0.5, 0.03),
    "chat": Slo(2.0, 0.1),
    "long_document": Slo(10.0, 0.1),
    "mixed": Slo(0.5, 0.03),
}
"""Service levels of requests, from MLPerf Inference for Llama 3.1 8B. Code has the interactive
limits, and chat has the server limits. Documents have five times the TTFT limit. `mixed` has
classes."""

REQUESTS: Final = {"code": 400, "chat": 1200, "long_document": 200, "mixed": 500}
"""Number of requests per run, enough to keep a saturated worker's batch full for most of the run.
"""

SHARES: Final = (0.02, 0.3, 0.6, 0.85, 1.0, 1.2, 1.6)
"""Fractions of the highest rate without speculation, from idle to overloaded."""

BURST_RPS: Final = 1e5
"""Requests per second at which all requests arrive practically simultaneously."""

BATCH_TIERS: Final = Path(__file__).parent / "batch_tiers.json"
"""Default lengths of SGLang by batch size, for `threshold_by_batch` (adaptive `num_steps`: 7 from 1
on, 3 from 8, 1 from 32, 0 from 64)."""

FIXED: Final = ("fixed:1", "fixed:2", "fixed:4", "fixed:8")
OTHERS: Final = ("smartspec", f"threshold_by_batch:{BATCH_TIERS}", "adaptive_verification")
POLICIES: Final = ("off", *FIXED, *OTHERS, "auto", "oracle")

INFORMED: Final = (
    "auto+cost",
    "auto+drafts",
    "auto+cost+drafts",
    "auto+rates",
    "auto+acceptance",
    "auto+acceptance+cost+drafts",
)
"""Variants of `auto` that know true values."""

ATTRIBUTED: Final = ("off", "auto", *INFORMED, "oracle")

COMPARED_METRIC: Final = "latency_s.mean"
"""The metric by which policies are compared."""

WITHIN: Final = 0.02
"""Relative difference of means below which two policies count as equal."""


@dataclass(frozen=True, slots=True)
class Study:
    """The settings of all cells.

    Attributes:
        recording: the texts whose drafts are replayed.
        share: fraction of `REQUESTS` in each run.
        policies: compared policies.
    """

    config: WorkerConfig
    recording: Recording
    share: float
    seeds: int
    policies: Sequence[str] = POLICIES

    def cell(self, workload: str, rate_rps: float) -> dict[str, Any]:
        """Simulate all policies under a load, and compare their metrics with `auto`."""
        slo = SERVICE_LEVELS[workload]
        setup = self._setup(workload, rate_rps, self.policies, self.seeds, slo)
        outcomes = run_experiment(setup).outcomes
        by_name = {_short_name(outcome.policy): outcome for outcome in outcomes}
        return {
            "workload": workload,
            "rate_rps": rate_rps,
            "policies": {name: _figures(outcome) for name, outcome in by_name.items()},
            "auto": findings(by_name) if "fixed:1" in by_name else None,
            "shares": shares_of_oracle(by_name),
        }

    def saturated_rps(self, workload: str) -> float:
        """Return the throughput without speculation, in requests per second."""
        results = run_experiment(self._setup(workload, BURST_RPS, ("off",), 1, Slo()))
        run = results.outcomes[0].run
        assert run is not None
        return len(run.records) / run.duration_s

    def _setup(
        self, workload: str, rate_rps: float, policies: Sequence[str], seeds: int, slo: Slo
    ) -> Setup:
        requests = max(int(self.share * REQUESTS[workload]), 1)
        load = Load(workload=workload, rate_rps=rate_rps, requests=requests, slo=slo)
        # The survivals that `auto+rates` knows are those of the replayed texts alone.
        recording = self.recording if workload == "mixed" else self.recording.replayed_by(workload)
        return Setup(load, self.config, tuple(policies), repeat=seeds, recording=recording)


def findings(outcomes: dict[str, ExperimentOutcome]) -> dict[str, Any]:
    """Return the comparison of `auto` with each other policy, and its share of the oracle's gain.

    `to_envelope` is the difference of `auto` to the best fixed length, and `relative` is the ratio
    of this difference to the mean of that length. `at_envelope` is true if the ratio is at most
    `WITHIN`, or if the interval of the difference contains 0.
    """
    means = {name: estimates(outcome)[COMPARED_METRIC].mean for name, outcome in outcomes.items()}
    best = min(FIXED, key=means.__getitem__)
    auto = outcomes["auto"]
    to_others = {
        name: compared(auto, outcomes[name])[COMPARED_METRIC] for name in outcomes if name != "auto"
    }
    gain = means["off"] - means["oracle"]
    return {
        "best_fixed": best,
        "to_envelope": to_others[best],
        "at_envelope": _no_worse(to_others[best], WITHIN),
        "at_off": _no_worse(to_others["off"], WITHIN / 2),
        "differences": to_others,
        "share_of_oracle": (means["off"] - means["auto"]) / gain if gain > 0 else None,
    }


def shares_of_oracle(outcomes: dict[str, ExperimentOutcome]) -> dict[str, Any]:
    """Return each policy's share of the gain of the oracle over `off`, with its interval."""
    samples = {name: one.samples[COMPARED_METRIC] for name, one in outcomes.items()}
    gains = differences(samples["off"], samples["oracle"])
    shares = {}
    for name, own in samples.items():
        pairs = zip(differences(samples["off"], own), gains, strict=True)
        share = estimate([gained / gain for gained, gain in pairs if gain > 0.0])
        if share is not None and name not in {"off", "oracle"}:
            shares[name] = share.as_dict()
    return shares


def _no_worse(difference: dict[str, Any], within: float) -> bool:
    interval = difference["interval"]
    return difference["relative"] <= within or (interval is not None and interval[0] <= 0.0)


def _figures(outcome: ExperimentOutcome) -> dict[str, Any]:
    return {figure: value.as_dict() for figure, value in estimates(outcome).items()}


def _short_name(policy: str) -> str:
    """Return the name of a policy without the folder of its file."""
    name, _, argument = policy.partition(":")
    return f"{name}:{Path(argument).name}" if "/" in argument else policy


def cells(
    study: Study, workloads: Sequence[str], shares: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Simulate all loads, and print a line for each load."""
    for workload in workloads:
        saturated_rps = study.saturated_rps(workload)
        for share in shares:
            cell = {"share": share, **study.cell(workload, share * saturated_rps)}
            print(workload, share, _line(cell), flush=True)
            yield cell


def _line(cell: dict[str, Any]) -> str:
    auto = cell["auto"]
    if auto is None:
        shares = {name: f"{one['mean']:.1%}" for name, one in cell["shares"].items()}
        return f"of oracle {shares}"
    to = {name: f"{value['relative']:+.1%}" for name, value in auto["differences"].items()}
    return f"best {auto['best_fixed']}, auto against {to}, of oracle {auto['share_of_oracle']}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench policies`."""
    parser = bench_parser("policies", __doc__)
    parser.add_argument("--profile", default="h100-8b", help="simulated device, by name or file")
    parser.add_argument("--workloads", default=",".join(REQUESTS))
    parser.add_argument(
        "--requests", type=float, default=1.0, help="fraction of the default number of requests"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--shares",
        default=",".join(map(str, SHARES)),
        help="rates as fractions of the highest without speculation",
    )
    parser.add_argument("--proposer", default="ngram")
    parser.add_argument(
        "--attribute", action="store_true", help="compare variants of auto that know true values"
    )
    parser.add_argument(
        "--tuning", action="store_true", help="replay the texts that are not held out"
    )
    parser.add_argument("--recording", help="name or file (default: the recording of the profile)")
    args = parser.parse_args(arguments)
    config = WorkerConfig(
        profile=args.profile,
        proposer=args.proposer,
        max_model_len=32_768,
        max_num_seqs=256,
        max_step_tokens=2048,
    )
    recorded = load_recording(args.recording or load_profile(args.profile).recording)
    recording = recorded.tuning() if args.tuning else recorded.held_out()
    policies = ATTRIBUTED if args.attribute else POLICIES
    study = Study(config, recording, args.requests, args.seeds, policies)
    results: dict[str, Any] = {
        "format": "policies/1",
        **simulated_provenance("policies", arguments),
        "profile": load_profile(args.profile).source,
        "acceptance": recording.source,
        "settings": {
            "requests": {name: int(args.requests * many) for name, many in REQUESTS.items()},
            "seeds": args.seeds,
            "proposer": args.proposer,
            "promised": {name: [slo.ttft_s, slo.tpot_s] for name, slo in SERVICE_LEVELS.items()},
        },
        "cells": [],
    }
    workloads, shares = args.workloads.split(","), [float(x) for x in args.shares.split(",")]
    with running_study(args.json, results, "loads") as progress:
        for cell in cells(study, workloads, shares):
            results["cells"].append(cell)
            done, total = len(results["cells"]), len(workloads) * len(shares)
            progress.report("simulating", done, total)


if __name__ == "__main__":
    main()
