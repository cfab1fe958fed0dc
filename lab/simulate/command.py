"""Flags, progress and output of `draftgate simulate`.

The command imports heavy modules when it runs, so that `draftgate --help` starts quickly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import typer

from draftgate.gateway.cli.options import BAD_USAGE, FAILED, fail
from draftgate.loadgen.command_line import PlainTyper, flag_values, output_file, with_groups

if TYPE_CHECKING:
    from draftgate.backends.worker_config import WorkerConfig
    from draftgate.lab.sim.exact_replay import ExactReplay
    from draftgate.lab.sim.recorded_run import RecordedRun
    from draftgate.lab.simulate.experiment import OnRecord, Results, Setup
    from draftgate.loadgen.types import Record

app = PlainTyper("")

_RECORDED: Final = "recorded"
"""Arrival process of a recorded run."""

EXCLUDED: Final = (
    *("workload", "rate", "duration", "max_tokens", "temperature"),
    *("slo_ttft_ms", "slo_tpot_ms"),
)
"""Flags that describe other requests than those of a recorded run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """The load. Most fields are fields of `Load`."""

    panel: ClassVar = "Options"

    workload: Annotated[
        str | None,
        typer.Option(help="Workload: code, chat, long_document, shared_prefix, mixed, rag."),
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace (Azure, Mooncake, BurstGPT or JSONL).")
    ] = None
    arrival: Annotated[
        str | None,
        typer.Option(
            help="Arrival process: constant, poisson, gamma:CV, onoff[:ON_S,OFF_S], or recorded:"
            " that of --trace, or else the requests of --recording."
        ),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, for all workers together. A trace is scaled to this rate."
        ),
    ] = None
    duration: Annotated[float | None, typer.Option(help="Seconds of arrivals.")] = None
    requests: Annotated[int | None, typer.Option(min=1, help="Number of requests.")] = None
    time_scale: Annotated[
        float | None, typer.Option(help="Replay a trace this many times faster than recorded.")
    ] = None
    slo_ttft_ms: Annotated[float | None, typer.Option(help="SLO: time to first token.")] = None
    slo_tpot_ms: Annotated[float | None, typer.Option(help="SLO: time per output token.")] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Output tokens of each request.")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Temperature of all requests.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    """Fields of `Setup`."""

    panel: ClassVar = "Options"

    repeat: Annotated[
        int, typer.Option(min=1, help="Number of consecutive seeds, starting at --seed.")
    ] = 1
    phases: Annotated[
        str,
        typer.Option(
            help="Phases policy, which picks the workers of prompt and output: together, apart,"
            " splitwise, auto."
        ),
    ] = "together"
    routing: Annotated[
        str,
        typer.Option(help="Routing policy: least_cost, least_loaded, prefix_affinity, ..."),
    ] = "least_cost"
    rescheduling: Annotated[
        str, typer.Option(help="Rescheduling policy: off, llumnix[:LOW,HIGH], least_time, ...")
    ] = "off"
    binding: Annotated[
        str,
        typer.Option(
            help="When a request gets its worker: late, once it has capacity, or early, on arrival."
        ),
    ] = "late"
    belief_error: Annotated[
        float,
        typer.Option(min=0.0, max=0.99, help="Initial relative error of the workers' step costs."),
    ] = 0.3
    truth: Annotated[
        str,
        typer.Option(help="Device model: roofline (with noise) or profile (without noise)."),
    ] = "roofline"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFlags:
    """Fields of `WorkerConfig`, and the tokens of its KV memory."""

    panel: ClassVar = "Options"

    batching: Annotated[
        str, typer.Option(help="Batching policy: slack, fixed:TOKENS, prefill_first, decode_first.")
    ] = "slack"
    profile: Annotated[str, typer.Option(help="Device profile: a shipped name or a file.")] = (
        "h100-8b"
    )
    proposer: Annotated[
        str | None, typer.Option(help="Proposer: ngram (default), draft_model, sparse_self.")
    ] = None
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Maximum sequences of a batch.")] = 256
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a step.")] = 2048
    max_model_len: Annotated[int, typer.Option(min=2, help="Maximum tokens of a sequence.")] = 32768
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in the KV memory of a worker (default: the profile's)."),
    ] = None

    def config(self) -> WorkerConfig:
        """Return the configuration of a worker.

        Raises:
            ValueError: the profile is unknown, or a setting is wrong.
        """
        from draftgate.backends.sim.assembly import BLOCK_TOKENS
        from draftgate.backends.sim.profile import load_profile
        from draftgate.backends.worker_config import WorkerConfig

        given = flag_values(self)
        kv_tokens = given.pop("kv_tokens")
        if kv_tokens is not None:
            blocks = -(-kv_tokens // BLOCK_TOKENS)
            given["kv_bytes"] = blocks * BLOCK_TOKENS * load_profile(self.profile).kv_token_bytes
        return WorkerConfig(**given)


def simulate(  # noqa: PLR0913, PLR0917 - flags
    loaded: LoadFlags,
    cluster: ClusterFlags,
    worker: WorkerFlags,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of workers, one device each (default: those of --roles)."),
    ] = None,
    roles: Annotated[
        str, typer.Option(help="Number of workers of each role, such as prefill=2,decode=2.")
    ] = "",
    speculation: Annotated[
        list[str] | None,
        typer.Option(
            help="Speculation policies, including oracle. Separate them with commas or repeat the"
            " option (default: auto)."
        ),
    ] = None,
    recording: Annotated[
        str | None,
        typer.Option(help="Recorded acceptance to replay: a name or a file (default: profile's)."),
    ] = None,
    json_out: Annotated[
        Path | None,
        typer.Option("--json", help="Write the results to this file.", callback=output_file),
    ] = None,
    html_out: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page with plots to this file.", callback=output_file),
    ] = None,
) -> None:
    """Simulate a load under one or more policies, with production code in virtual time."""
    from draftgate.loadgen.interruption import interruptible

    with interruptible() as interruption:
        try:
            setup = _setup(loaded, cluster, worker, workers, roles, speculation, recording)
            results = _run(setup, json_out, html_out)
        except (OSError, ValueError) as error:
            fail(error, BAD_USAGE)
        except KeyboardInterrupt:
            fail("interrupted before the first run was complete", interruption.status)
    if results.interrupted:
        raise typer.Exit(interruption.status)
    every = (one for outcome in results.outcomes for one in outcome.failures.values())
    if any(one.never_worked for one in every):
        raise typer.Exit(FAILED)


app.command()(with_groups(simulate))


def _setup(
    loaded: LoadFlags,
    cluster: ClusterFlags,
    worker: WorkerFlags,
    workers: int | None,
    roles: str,
    speculation: list[str] | None,
    recording: str | None,
) -> Setup:
    """Return the experiment that the flags describe.

    Raises:
        OSError: a file cannot be read.
        ValueError: a flag is wrong.
    """
    from draftgate.lab.sim.recording import load_recording
    from draftgate.lab.simulate.experiment import Setup, read_roles
    from draftgate.loadgen.planning.plan import Load
    from draftgate.loadgen.types import Slo

    trace = loaded.trace
    replays = loaded.arrival == _RECORDED and trace is None
    if replays:
        trace = _recorded_file(recording, loaded)
    load = Load(
        workload=loaded.workload,
        trace=trace,
        arrival=None if loaded.arrival == _RECORDED else loaded.arrival,
        rate_rps=loaded.rate,
        duration_s=loaded.duration,
        requests=loaded.requests,
        time_scale=loaded.time_scale,
        max_tokens=loaded.max_tokens,
        temperature=loaded.temperature,
        slo=Slo.of_ms(loaded.slo_ttft_ms, loaded.slo_tpot_ms),
        seed=loaded.seed,
    )
    named = (name for text in speculation or ["auto"] for name in text.split(","))
    named_roles = read_roles(roles)
    return Setup(
        load=load,
        config=worker.config(),
        policies=tuple(filter(None, named)),
        workers=workers or max(len(named_roles), 1),
        recording=None if recording is None else load_recording(recording),
        replay=_exact_replay(trace) if replays and trace is not None else None,
        roles=named_roles,
        **flag_values(cluster),
    )


def _recorded_file(recording: str | None, load: LoadFlags) -> Path:
    """Return the file of a recorded run.

    Raises:
        ValueError: no recording is given, or a flag describes other requests.
    """
    if recording is None:
        raise ValueError(f"--arrival {_RECORDED} needs the file of a server: --recording FILE")
    for name in EXCLUDED:
        if getattr(load, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"--arrival {_RECORDED} replays recorded requests, and excludes {flag}"
            )
    return Path(recording)


def _exact_replay(file: Path) -> tuple[RecordedRun, ExactReplay]:
    """Replay a recorded run, and print what it contains.

    Raises:
        ValueError: the run cannot be replayed exactly.
    """
    from rich.console import Console

    from draftgate.lab.sim.exact_replay import replay_exactly
    from draftgate.lab.sim.recorded_run import load_run

    run = load_run(file)
    exact = replay_exactly(run)
    Console(stderr=True).print(
        f"live run with {run.worker.speculation}: {len(exact.requests)} requests, {exact.steps}"
        f" steps in {run.duration_s:.1f} s, {exact.drafted_tokens} draft tokens,"
        f" {exact.accepted_tokens} accepted; the replay made the same steps",
        highlight=False,
        soft_wrap=True,
    )
    return run, exact


def _run(setup: Setup, json_out: Path | None, html_out: Path | None) -> Results:
    """Simulate, print the table, and write the files, also after an interruption.

    Raises:
        KeyboardInterrupt: no run is complete.
        OSError: a file cannot be read or written.
        ValueError: a setting is wrong.
    """
    from rich.console import Console

    from draftgate.lab.simulate.experiment import ExperimentInterrupted, run_experiment
    from draftgate.lab.simulate.report import as_json, render_outcomes, simulation_page
    from draftgate.loadgen.report.progress import StepProgress

    errors = Console(stderr=True)
    try:
        with StepProgress("preparing", "requests") as progress:
            results = run_experiment(setup, _counting(setup, progress.report))
    except ExperimentInterrupted as interrupted:
        results = interrupted.results
        if not results.outcomes:
            raise
    if json_out is not None:
        text = json.dumps(as_json(setup, results), indent=1)
        json_out.write_text(text + "\n", encoding="utf-8")
    if html_out is not None:
        html_out.write_text(simulation_page(setup, results), encoding="utf-8")
    Console().print(render_outcomes(results))
    rate = results.requests / max(results.cpu_s, 1e-9)
    effort = f"{results.requests} requests in {results.cpu_s:.1f} CPU s: {rate:.0f} per CPU second"
    errors.print(effort, highlight=False)
    return results


def _counting(setup: Setup, report: Callable[[str, int, int | None], None]) -> OnRecord:
    """Return a callback that reports the number of finished requests of each run."""
    total = setup.load.longest  # None if only the duration is known
    runs = [(policy, seed) for seed in setup.seeds for policy in setup.policies]
    ended = dict.fromkeys(runs, 0)
    names = {
        (policy, seed): f"run {place} of {len(runs)}: {policy}"
        + ("" if setup.repeat == 1 else f", seed {seed}")
        for place, (policy, seed) in enumerate(runs, 1)
    }

    def on_record(policy: str, seed: int, _record: Record) -> None:
        run = policy, seed
        ended[run] += 1
        report(names[run], ended[run], total)

    return on_record
