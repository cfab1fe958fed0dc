"""Experiments that run several policies on the same load, with one or more seeds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from msgspec import structs

from draftgate.backends.recorded_run import seconds_at
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import BINDINGS
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.run import Event, Move, Watch
from draftgate.lab.sim.environment import SimEnvironment
from draftgate.lab.sim.exact_replay import ExactReplay
from draftgate.lab.sim.recorded_run import RecordedRun, RunTokens, request_id
from draftgate.lab.sim.recording import Recording, load_recording
from draftgate.lab.simulate.cluster import ADMIT_ALL, SimulatedCluster, simulate_requests
from draftgate.lab.simulate.conversion import job_of
from draftgate.lab.simulate.intervals import batch_means
from draftgate.loadgen.measuring.metrics import latency_s, tpot_s, ttft_s
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.planning.plan import Load, Plan, make_plan
from draftgate.loadgen.planning.traces import TraceRow, read_trace
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import ClientHealth, LoadRun, PlannedRequest, Record, RequestSpec, Slo
from draftgate.policies.guarded import Guard, watched_guards
from draftgate.policies.registry import phases_policy, rescheduling_policy, routing_policy
from draftgate.policies.speculation.plan_reason import PlanCause
from draftgate.policies.types import Role

CLASS_NAME: Final = "recorded"


def recorded_plan(run: RecordedRun, load: Load) -> Plan:
    """Return the requests of a run that have output, at their recorded times.

    Args:
        load: the maximum number of requests and the time scale.

    Raises:
        ValueError: no request has output.
    """
    scale, requests = load.time_scale or 1.0, list[PlannedRequest]()
    with_output = (number for number in range(len(run.arrivals)) if run.length(number))
    for number in islice(with_output, load.requests):
        arrival = run.arrivals[number]
        service, most = arrival.request.service, arrival.request.max_tokens
        slo = Slo(service.ttft_s, service.tpot_s)
        request = RequestSpec("", (), most, number, CLASS_NAME, slo=slo)
        requests.append(PlannedRequest(number, seconds_at(arrival.ticks) / scale, request))
    if not requests:
        raise ValueError("no request of the recorded run has output")
    return Plan(requests, None, requests[-1].at_s, len(requests))


def recorded_job_of(run: RecordedRun) -> Callable[[PlannedRequest], Job]:
    """Return the function that converts a recorded request to a job."""
    tokens = RunTokens(run, run.ended)

    def job_of(planned: PlannedRequest) -> Job:
        recorded = run.request(planned.index)
        plan = recorded.plan
        client_cap = plan.max_draft_tokens if plan.cause is PlanCause.CLIENT_CAP else None
        return Job(
            request_id=request_id(CLASS_NAME, planned.index),
            prompts=(tokens.prompt_ids(planned.index),),
            sampling=SamplingParams(recorded.max_tokens, planned.index, recorded.temperature),
            max_tokens=recorded.max_tokens,
            mode=plan.mode,
            max_draft_tokens=client_cap,
            service=recorded.service,
            repetitions=(plan.figures.repetition,),
        )

    return job_of


class MoveCounts:
    """An observer that counts moves by reason and end, as in `faster moved`."""

    def __init__(self) -> None:
        self.ends = Counter[str]()

    def __call__(self, event: Event) -> None:
        """Count a move."""
        if isinstance(event, Move):
            self.ends[f"{event.reason.value} {event.end.value}"] += 1


NEVER_LATE: Final = ClientHealth(0.0, 0.0, 0.0, 0.0)
"""Health of a load generator that is never late, as in virtual time."""

TRUTHS: Final = ("roofline", "profile")
"""The device models."""


@dataclass(frozen=True, slots=True)
class Setup:
    """An experiment with one load, one cluster and several policies.

    Attributes:
        load: an open loop, whose seed is the first seed.
        config: the configuration of every worker, whose policy is replaced.
        policies: names of speculation policies, such as `fixed:4`.
        routing: name of the routing policy.
        repeat: number of seeds.
        belief_error: initial relative error of the workers' step costs.
        recording: the texts whose drafts are replayed; None means those of the profile.
        truth: `roofline`, or `profile` for devices that follow the profile exactly.
        replay: the recorded run whose requests are the load, and its exact replay, or None.
        rescheduling: name of the rescheduling policy.
        binding: `late` or `early`, as in `WaitingRules`.
        phases: name of the phases policy.
        roles: roles of the first workers. The others have the role `any`.
    """

    load: Load
    config: WorkerConfig
    policies: tuple[str, ...]
    workers: int = 1
    routing: str = "least_cost"
    repeat: int = 1
    belief_error: float = 0.3
    truth: str = "roofline"
    recording: Recording | None = None
    replay: tuple[RecordedRun, ExactReplay] | None = None
    rescheduling: str = "off"
    binding: str = "late"
    phases: str = "together"
    roles: tuple[Role, ...] = ()

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: the load is not an open loop, a policy is named twice, a name is unknown, or
                there are more roles than workers.
        """
        routing_policy(self.routing)
        rescheduling_policy(self.rescheduling)
        if self.binding not in BINDINGS:
            raise ValueError(f"binding: expected {' or '.join(BINDINGS)}, not {self.binding!r}")
        phases_policy(self.phases)
        if len(self.roles) > self.workers:
            raise ValueError(f"{len(self.roles)} roles need as many workers, not {self.workers}")
        if self.truth not in TRUTHS:
            raise ValueError(f"truth: expected one of {', '.join(TRUTHS)}, not {self.truth!r}")
        if self.load.clients is not None:
            raise ValueError("a simulation needs requests per second (--rate) or a trace (--trace)")
        if len(set(self.policies)) < len(self.policies):
            raise ValueError(f"a policy is named twice: {', '.join(self.policies)}")

    @property
    def replayed(self) -> Recording:
        """The recording, by default the profile's.

        Raises:
            ValueError: the profile or its recording cannot be read.
        """
        return self.recording or load_recording(load_profile(self.config.profile).recording)

    @property
    def seeds(self) -> range:
        """The seeds of the runs."""
        return range(self.load.seed, self.load.seed + self.repeat)


@dataclass(frozen=True, slots=True)
class PolicyFailure:
    """The failures of a method of a policy.

    Attributes:
        failed, calls: number of calls that failed, and of all calls.
        error: the first error.
    """

    policy: str
    method: str
    failed: int
    calls: int
    error: str

    @property
    def never_worked(self) -> bool:
        """Whether all calls failed."""
        return self.failed >= self.calls

    def __str__(self) -> str:
        return f"{self.policy} failed in {self.failed} of {self.calls} calls of {self.method}"


@dataclass(slots=True)
class ExperimentOutcome:
    """The results of one policy.

    Attributes:
        summaries: a `summary/1` per seed.
        run: the run with the first seed, for plots.
        samples: nearly independent values of each metric, from the batches of one run or from
            several seeds. Values of two policies at the same index belong to the same requests.
        moves: number of moves by reason and end, as in `MoveCounts`.
        failures: failures of policies of other packages, in whose place others decided.
    """

    policy: str
    summaries: list[dict[str, Any]] = field(default_factory=list)
    run: LoadRun | None = None
    samples: dict[str, list[float | None]] = field(default_factory=dict)
    moves: Counter[str] = field(default_factory=Counter)
    failures: dict[tuple[str, str], PolicyFailure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Results:
    """The outcomes of all policies.

    Attributes:
        outcomes: one outcome per policy, in the order of the policies.
        requests: number of simulated requests.
        cpu_s: CPU time of the simulation, in seconds.
        interrupted: whether the user ended the simulation. There are then fewer seeds, of which
            each has all policies, or fewer policies, of which each has the first seed.
    """

    outcomes: list[ExperimentOutcome]
    requests: int
    cpu_s: float
    interrupted: bool = False


class ExperimentInterrupted(KeyboardInterrupt):
    """The end of an experiment by the user, with the results so far."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self.results = results


def read_roles(text: str) -> tuple[Role, ...]:
    """Return the roles in a text such as `prefill=2,decode=2`.

    Raises:
        ValueError: a role or its number of workers is invalid.
    """
    roles = list[Role]()
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in set(Role) or not number.isdecimal():
            raise ValueError(f"expected roles as in prefill=2,decode=2, not {part!r}")
        roles += [Role(name)] * int(number)
    return tuple(roles)


OnRecord = Callable[[str, int, Record], None]
"""A callback that receives each record with its policy and seed."""


def run_experiment(setup: Setup, on_record: OnRecord = lambda _p, _s, _r: None) -> Results:
    """Simulate every policy with every seed.

    Raises:
        ExperimentInterrupted: KeyboardInterrupt was raised.
        OSError: the trace or the text cannot be read.
        ValueError: a setting is wrong.
    """
    trace = setup.load.trace if setup.replay is None else None
    rows = () if trace is None else read_trace(trace)
    outcomes = [ExperimentOutcome(policy) for policy in setup.policies]
    began_s, requests, interrupted = time.process_time(), 0, False
    # No object is freed before the end, so full collections would scan millions of objects in vain.
    with without_full_gc():
        for seed in setup.seeds:
            runs = list[tuple[LoadRun, MoveCounts]]()
            try:
                for policy, outcome in zip(setup.policies, outcomes, strict=True):
                    watch = MoveCounts()
                    with watched_guards() as guards:
                        run = _run(setup, policy, seed, rows, on_record, watch)
                    runs.append((run, watch))
                    _add_failures(outcome, guards)
            except KeyboardInterrupt:
                interrupted = True
            if not interrupted or seed == setup.load.seed:
                for outcome, (run, watch) in zip(outcomes, runs, strict=False):
                    requests += len(run.records)
                    _add_run(outcome, run, watch, repeated=setup.repeat > 1)
            if interrupted:
                break
    complete = [outcome for outcome in outcomes if outcome.run is not None]
    results = Results(complete, requests, time.process_time() - began_s, interrupted)
    if interrupted:
        raise ExperimentInterrupted(results)
    return results


def _add_failures(outcome: ExperimentOutcome, guards: Iterable[Guard]) -> None:
    """Add the failures of a run to those of earlier seeds and of other workers."""
    for guard in guards:
        for method, failed in guard.failed.items():
            key = guard.name, method
            error, calls = repr(guard.errors[method]), guard.calls[method]
            before = outcome.failures.get(key, PolicyFailure(*key, 0, 0, error))
            outcome.failures[key] = replace(
                before, failed=before.failed + failed, calls=before.calls + calls
            )


def _run(
    setup: Setup,
    policy: str,
    seed: int,
    rows: Sequence[TraceRow],
    on_record: OnRecord,
    watch: Watch,
) -> LoadRun:
    """Simulate one policy with one seed, which determines all random choices."""
    load = replace(setup.load, seed=seed)
    config = structs.replace(setup.config, speculation=policy)
    run = None if setup.replay is None else setup.replay[0]
    environment = SimEnvironment(
        seed=seed,
        belief_error=setup.belief_error,
        roofline=setup.truth == "roofline",
        recording=setup.replayed,
        run=run,
        delivers_tokens=setup.rescheduling != "off" or phases_policy(setup.phases).separates,
    )
    rules = replace(
        ADMIT_ALL,
        routing=setup.routing,
        rescheduling=setup.rescheduling,
        binding=setup.binding,
        phases=setup.phases,
    )
    cluster = SimulatedCluster(config, setup.workers, environment, rules, roles=setup.roles)
    to_job: Callable[[PlannedRequest], Job] = job_of
    if run is None:
        plan = make_plan(load, rows=rows, max_model_len=config.max_model_len, lazily=True)
    else:
        plan, to_job = recorded_plan(run, load), recorded_job_of(run)
    records = simulate_requests(
        cluster, plan.requests, lambda record: on_record(policy, seed, record), to_job, watch
    )
    return LoadRun(
        {"model": config.profile, "url": "simulated", "policy": policy, "seed": seed},
        records,
        max((record.end_s for record in records), default=0.0),
        plan.schedule_s,
        NEVER_LATE,
    )


def _without_health(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the summary without the values that only a real load generator has."""
    dropped = {"health", "lossless", "invalid_reasons"}
    kept = {key: value for key, value in summary["details"].items() if key not in dropped}
    return {**summary, "details": kept}


_REQUEST_METRICS: Final[dict[str, Callable[[Record], float | None]]] = {
    "latency_s.mean": lambda record: latency_s(record) if record.chunks else None,
    "ttft_s.mean": ttft_s,
    "tpot_s.mean": tpot_s,
    "attainment": lambda record: float(meets_slo(record)),
}
"""Means over requests, whose intervals result from the batches of a single run."""

_SEED_METRICS: Final = (
    *_REQUEST_METRICS,
    "latency_s.p99",
    "ttft_s.p99",
    "tpot_s.p99",
    "goodput_rps",
    "accepted_tokens_per_s",
)
"""Metrics of a summary, whose intervals result from several seeds."""


def _add_run(
    outcome: ExperimentOutcome, run: LoadRun, watch: MoveCounts, *, repeated: bool
) -> None:
    outcome.moves += watch.ends
    outcome.summaries.append(_without_health(summarize(run)))
    outcome.run = outcome.run or run
    if not repeated:
        for metric, value in _REQUEST_METRICS.items():
            outcome.samples[metric] = batch_means([value(record) for record in run.records])
        return
    for metric in _SEED_METRICS:
        value_or_none: Any = outcome.summaries[-1]
        for name in metric.split("."):
            value_or_none = None if value_or_none is None else value_or_none[name]
        sample = None if value_or_none is None else float(value_or_none)
        outcome.samples.setdefault(metric, []).append(sample)
