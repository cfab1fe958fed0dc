"""Policies on the same load, seed after seed, and what each gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from msgspec import structs

from draftgate.backends.sim.simulated import World
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import EVERYBODY_WAITS, Cluster, simulate
from draftgate.gateway.cli.simulate.intervals import batch_means
from draftgate.loadgen.measuring.metrics import latency_s, tpot_s, ttft_s
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.planning.traces import TraceRow, read_trace
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import ClientHealth, LoadRun, Record
from draftgate.policies.registry import routing_policy

NEVER_LATE: Final = ClientHealth(0.0, 0.0, 0.0, 0.0)
"""The health of a generator whose clock waits for it."""

TRUTHS: Final = ("roofline", "profile")
"""What a simulated device may be."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated: one load, one cluster, several policies.

    Attributes:
        load: an open loop; `load.seed` is the first seed.
        config: of every worker; its policy is replaced.
        policies: names, e.g. `fixed:4`.
        routing: the policy that chooses workers, by name.
        repeat: how many seeds.
        belief_error: share by which workers misjudge step costs at first.
        truth: `roofline`, or `profile` for devices that do just what the profile says.
    """

    load: Load
    config: WorkerConfig
    policies: tuple[str, ...]
    workers: int = 1
    routing: str = "least_cost"
    repeat: int = 1
    belief_error: float = 0.3
    truth: str = "roofline"

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated.

        Raises:
            ValueError: the load is no open loop, a policy is named twice, or a name is unknown.
        """
        routing_policy(self.routing)
        if self.truth not in TRUTHS:
            raise ValueError(f"truth: expected one of {', '.join(TRUTHS)}, not {self.truth!r}")
        if self.load.clients is not None:
            raise ValueError("a simulation has a schedule: give a rate, or a trace")
        if len(set(self.policies)) < len(self.policies):
            raise ValueError(f"a policy is named twice: {', '.join(self.policies)}")


@dataclass(slots=True)
class Outcome:
    """What a policy gave.

    Attributes:
        summaries: `summary/1` by seed.
        run: that of the first seed, for plots.
        samples: nearly independent values by figure: means of batches of the one run, or a value
            for each seed. The same places of two policies belong to the same requests.
    """

    policy: str
    summaries: list[dict[str, Any]] = field(default_factory=list)
    run: LoadRun | None = None
    samples: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Results:
    """The outcomes in the order of the policies, and the effort of simulating them."""

    outcomes: list[Outcome]
    requests: int
    cpu_s: float


Told = Callable[[str, int, Record], None]
"""Hears of each record: policy and seed it belongs to."""


def run_experiment(setup: Setup, on_record: Told = lambda _p, _s, _r: None) -> Results:
    """Simulate every policy with every seed.

    Raises:
        OSError: the trace or text cannot be read.
        ValueError: a setting is wrong.
    """
    rows = () if setup.load.trace is None else read_trace(setup.load.trace)
    outcomes = [Outcome(policy) for policy in setup.policies]
    began_s = time.process_time()
    # What a simulation keeps it keeps to its end: no need to look through millions of objects.
    with without_full_gc():
        requests = _simulate_all(setup, outcomes, rows, on_record)
    return Results(outcomes, requests, time.process_time() - began_s)


def _simulate_all(
    setup: Setup, outcomes: Sequence[Outcome], rows: Sequence[TraceRow], on_record: Told
) -> int:
    """Simulate every policy with every seed; return how many requests that were."""
    requests = 0
    for seed in range(setup.load.seed, setup.load.seed + setup.repeat):
        for outcome in outcomes:
            run = _run(setup, outcome.policy, seed, rows, on_record)
            requests += len(run.records)
            outcome.summaries.append(_without_health(summarize(run)))
            _sample(outcome, run, repeated=setup.repeat > 1)
            outcome.run = outcome.run or run
    return requests


def _run(setup: Setup, policy: str, seed: int, rows: Sequence[TraceRow], told: Told) -> LoadRun:
    """Simulate one policy with one seed, on which all that is random depends."""
    load = replace(setup.load, seed=seed)
    config = structs.replace(setup.config, speculation=policy)
    plan = make_plan(load, rows=rows, max_model_len=config.max_model_len, lazily=True)
    world = World(seed, setup.belief_error, setup.truth == "roofline")
    rules = replace(EVERYBODY_WAITS, routing=setup.routing)
    cluster = Cluster(config, setup.workers, world, rules)
    records = simulate(cluster, plan.requests, lambda record: told(policy, seed, record))
    return LoadRun(
        {"model": config.profile, "url": "simulated", "policy": policy, "seed": seed},
        records,
        max((record.end_s for record in records), default=0.0),
        plan.schedule_s,
        NEVER_LATE,
    )


def _without_health(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the summary without what only a real generator has."""
    told = {"health", "lossless", "invalid_reasons"}
    kept = {key: value for key, value in summary["details"].items() if key not in told}
    return {**summary, "details": kept}


def _sample(outcome: Outcome, run: LoadRun, *, repeated: bool) -> None:
    """Add a run's values to the samples."""
    if not repeated:
        for figure, value in _OF_REQUESTS.items():
            outcome.samples[figure] = batch_means([value(record) for record in run.records])
        return
    for figure in SAMPLED:
        outcome.samples.setdefault(figure, []).append(_looked_up(outcome.summaries[-1], figure))


_OF_REQUESTS: Final[dict[str, Callable[[Record], float | None]]] = {
    "latency_s.mean": lambda record: latency_s(record) if record.chunks else None,
    "ttft_s.mean": ttft_s,
    "tpot_s.mean": tpot_s,
    "attainment": lambda record: float(meets_slo(record)),
}

SAMPLED: Final = (
    *_OF_REQUESTS,
    "latency_s.p99",
    "ttft_s.p99",
    "tpot_s.p99",
    "goodput_rps",
    "accepted_tokens_per_s",
)
"""Figures of a summary that get intervals where there are several seeds; of one run the first four,
which are means over requests."""


def _looked_up(summary: dict[str, Any], figure: str) -> float | None:
    value: Any = summary
    for name in figure.split("."):
        value = None if value is None else value[name]
    return None if value is None else float(value)
