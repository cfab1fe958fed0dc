"""Two classes of service: what weights by lateness give to one and take from the other.

    draftgate bench classes --json OUT --html OUT

The same work (chat) on one worker, half of it promised a tight time per token and half a loose one,
by lot, at a share of the highest rate that can be sustained for a minute (median scheduling delay
of 2 s at most). The tight target is the median time per token where nobody is promised anything, so
that half the requests meet it by themselves; the loose one is half as much again. `auto` weighs
tokens by how late their sequence is, `auto:unweighted` does not; batching is the same. Differences
are paired by seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, median
from typing import Any, Final

from bench.studies.capacity import LATEST_S, median_delay_s
from bench.studies.record import provenance, study_parser, write_results
from bench.studies.search import grid_rate, highest_place, nearest_place
from draftgate.backends.base import WorkerConfig
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.sim.simulated import World
from draftgate.gateway.cli.simulate.cluster import Cluster, simulate
from draftgate.gateway.cli.simulate.intervals import estimate
from draftgate.gateway.cli.simulate.prompts import job_of
from draftgate.gateway.dispatch.job import Job
from draftgate.loadgen.measuring.metrics import tpot_s, ttft_s
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.report.formatting import percent
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec, Slo

WORKLOAD: Final = "chat"
TIGHT, LOOSE = "tight", "loose"
SUSTAINED_S: Final = 60.0
"""Length of the runs by which the highest rate is found: a queue that grows needs time to show."""

LOOSE_BY: Final = 1.5
"""The loose target as a multiple of the tight one."""

PLAIN, WEIGHED = "auto:unweighted", "auto"


@dataclass(frozen=True, slots=True)
class Classes:
    """Requests of two classes, and the worker that they go to.

    Attributes:
        config: its policy is replaced.
        rate_rps: of both classes together.
        targets: by class; empty promises nothing.
    """

    config: WorkerConfig
    duration_s: float
    rate_rps: float
    targets: dict[str, float]

    def records(self, speculation: str, seed: int) -> list[Record]:
        """Simulate one policy; classes, texts and instants are the seed's."""
        load = Load(
            workload=WORKLOAD, rate_rps=self.rate_rps, duration_s=self.duration_s, seed=seed
        )
        plan = make_plan(load, max_model_len=self.config.max_model_len, lazily=True)
        drawn = Random(f"classes/{seed}")
        planned = [
            replace(one, request=self._promised(one.request, drawn.choice((TIGHT, LOOSE))))
            for one in plan.requests
        ]
        config = replace(self.config, speculation=speculation)
        return simulate(Cluster(config, 1, World(seed)), planned, to_job=_job)

    def _promised(self, question: RequestSpec, name: str) -> RequestSpec:
        return replace(question, class_name=name, slo=Slo(tpot_s=self.targets.get(name)))


def _job(planned: PlannedRequest) -> Job:
    """Return a request's job: what it replays is the workload's, whatever its class."""
    question = replace(planned.request, class_name=WORKLOAD)
    return job_of(replace(planned, request=question))


def figures(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return attainment, median time per token and P99 of the first, by class."""
    found = {}
    for name in (TIGHT, LOOSE):
        own = [record for record in records if record.planned.request.class_name == name]
        tpots_s = sorted(v for record in own if (v := tpot_s(record)) is not None)
        ttfts_s = sorted(v for record in own if (v := ttft_s(record)) is not None)
        found[name] = {
            "requests": len(own),
            "attainment": sum(map(meets_slo, own)) / len(own),
            "tpot_p50_s": median(tpots_s),
            "ttft_p50_s": median(ttfts_s),
        }
    return found


def highest_rate(config: WorkerConfig, near_rps: float) -> float:
    """Return the highest rate whose median scheduling delay is at most `LATEST_S`.

    Raises:
        ValueError: no rate is low enough.
    """

    def holds(place: int) -> bool:
        records = Classes(config, SUSTAINED_S, grid_rate(place), {}).records(PLAIN, 0)
        return median_delay_s(records) <= LATEST_S

    place = highest_place(holds, nearest_place(near_rps))
    if place is None:
        raise ValueError("the scheduling delay is too long at every rate")
    return grid_rate(place)


def promised(free: Classes) -> Classes:
    """Return the classes with targets, by what requests take where nothing is promised."""
    tpots_s = [v for record in free.records(PLAIN, 0) if (v := tpot_s(record)) is not None]
    tight_s = median(tpots_s)
    return replace(free, targets={TIGHT: tight_s, LOOSE: LOOSE_BY * tight_s})


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by class what attainment gains by weights, paired by seed, with its interval."""
    attained = {
        (run["speculation"], run["seed"], name): run[name]["attainment"]
        for run in runs
        for name in (TIGHT, LOOSE)
    }
    seeds = sorted({run["seed"] for run in runs})
    gained = {}
    for name in (TIGHT, LOOSE):
        found = estimate(
            [attained[WEIGHED, seed, name] - attained[PLAIN, seed, name] for seed in seeds]
        )
        assert found is not None
        gained[name] = found.as_dict()
    return gained


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the rate and the targets, run all seeds with and without weights, compare."""
    parser = study_parser("classes", __doc__)
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.8, help="of the highest rate")
    parser.add_argument("--near", type=float, default=70.0, help="rate to begin the search at")
    parser.add_argument("--batching", default="fixed:512,slack")
    args = parser.parse_args(arguments)
    first = WorkerConfig(
        profile=args.profile,
        proposer="ngram",
        max_num_seqs=256,
        max_model_len=32_768,
        max_step_tokens=2048,
        batching=args.batching.partition(",")[0],
    )
    with without_full_gc():
        highest_rps = highest_rate(first, args.near)
        classes = promised(Classes(first, args.duration, args.share * highest_rps, {}))
        studied = {
            batching: _runs(replace(classes, config=replace(first, batching=batching)), args.seeds)
            for batching in args.batching.split(",")
        }
    results = {
        "format": "classes/1",
        **provenance("classes", arguments),
        "profile": load_profile(args.profile).source,
        "highest_rps": highest_rps,
        "rate_rps": classes.rate_rps,
        "targets_s": classes.targets,
        "settings": {"workload": WORKLOAD, "duration_s": args.duration, "share": args.share},
        "batching": {
            name: {"gained": compared(runs), "runs": runs} for name, runs in studied.items()
        },
    }
    write_results(args, results, "Classes of service, simulated", _body(results))


def _runs(classes: Classes, seeds: int) -> list[dict[str, Any]]:
    runs = []
    for seed in range(seeds):
        for speculation in (PLAIN, WEIGHED):
            found = figures(classes.records(speculation, seed))
            runs.append({"seed": seed, "speculation": speculation, **found})
            print(classes.config.batching, runs[-1])
    return runs


def _body(results: dict[str, Any]) -> Iterator[str]:
    yield "<h1>Two classes of service, with and without weights</h1>"
    rows = [
        [batching, name, *_attained(told, name)]
        for batching, told in results["batching"].items()
        for name in told["gained"]
    ]
    head = ["batching", "class", "attained without", "with weights", "gained", "95 %"]
    yield html_table(head, rows, __doc__ or "")


def _attained(told: dict[str, Any], name: str) -> list[str]:
    shares = {
        speculation: fmean(
            run[name]["attainment"] for run in told["runs"] if run["speculation"] == speculation
        )
        for speculation in (PLAIN, WEIGHED)
    }
    gained = told["gained"][name]
    ends = "-" if gained["interval"] is None else " to ".join(map(percent, gained["interval"]))
    return [percent(shares[PLAIN]), percent(shares[WEIGHED]), percent(gained["mean"]), ends]


if __name__ == "__main__":
    main()
