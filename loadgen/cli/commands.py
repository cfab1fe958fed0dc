"""The commands of the load generator, their output and their exit status."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import typer
from rich.console import Console

from draftgate.addresses import mask_url
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.cli.flags import (
    HtmlOut,
    JsonOut,
    OutputFlags,
    Processes,
    RequestFlags,
    ScheduleFlags,
    SearchFlags,
    ServerFlags,
    Url,
)
from draftgate.loadgen.command_line import output_file, reason
from draftgate.loadgen.compare import report as compare_report
from draftgate.loadgen.compare.comparison import compare_runs, parse_threshold
from draftgate.loadgen.events import read_events
from draftgate.loadgen.interruption import Interruption, interruptible
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.other_tools import render_as
from draftgate.loadgen.report.page import run_page
from draftgate.loadgen.report.progress import StepProgress
from draftgate.loadgen.report.runs import RunReport, name_of
from draftgate.loadgen.report.terminal import render_run, render_side_by_side
from draftgate.loadgen.search import report as search_report
from draftgate.loadgen.search.runner import search_load
from draftgate.loadgen.search.types import ProbeResult, SearchResult, StopReason
from draftgate.loadgen.sending.calibrate import CalibrationProbe, find_ceilings, render_ceilings
from draftgate.loadgen.sending.health import invalid_reasons
from draftgate.loadgen.sending.run import run_load
from draftgate.loadgen.sweep import (
    Done,
    Sweep,
    parse_rates,
    parse_targets,
    run_sweep,
    shuffled_cells,
    sweep_as_dict,
)
from draftgate.loadgen.types import LoadRun

NOT_INTACT: Final = 1
REGRESSION: Final = 1
ONLY_A_BOUND: Final = 1
USAGE: Final = 2
_INVALID: Final = 3
_REFUSED: Final = 4


def run(
    url: Url,
    request: RequestFlags,
    schedule: ScheduleFlags,
    server: ServerFlags,
    output: OutputFlags,
    processes: Processes = 1,
    verify_lossless: Annotated[
        int,
        typer.Option(
            min=0,
            help="Replay this many responses without speculation, and compare the texts.",
            rich_help_panel=OutputFlags.panel,
        ),
    ] = 0,
    events_out: Annotated[
        Path | None,
        typer.Option(
            "--events",
            help="Write the events (JSON lines) here.",
            callback=output_file,
            rich_help_panel=OutputFlags.panel,
        ),
    ] = None,
) -> None:
    """Send load and check every stream.

    The exit status is 0 on success. A broken stream or a different replay gives 1. An unreachable
    server or a wrong flag gives 2. An INVALID run gives 3, because this generator did not keep up.
    Refused requests (429, 503) without a worse failure give 4. Ctrl-C and SIGTERM keep the result
    so far, and give 130 and 143.
    """
    with _exit_on_error(f"cannot load {mask_url(url)}", mask_url(url)) as interruption:
        target = server.target(url, verify=verify_lossless, events=events_out, processes=processes)
        load = schedule.load(request)
        ran, check = interruption.run(run_load(load, target, Console(stderr=True)))
        _print_reports([RunReport(mask_url(url), ran, check)], output)
    if ran.interrupted and not ran.lost:  # not by the end of a process
        raise typer.Exit(interruption.status)
    raise typer.Exit(exit_status(ran, check))


def report(
    events: Annotated[
        list[str],
        typer.Argument(help="Event files of `--events`. Several runs appear side by side."),
    ],
    output: OutputFlags,
) -> None:
    """Report on the events of a run as `run` does, with the same exit status.

    Runs with the same name are points of one curve over the rate. The name is the file name without
    rate and round (`auto` for `auto-1.5-2.jsonl`), unless given as NAME=FILE.
    """
    with _exit_on_error("cannot report"):
        reports = [_read(named) for named in events]
        _print_reports(reports, output)
    raise typer.Exit(worst(exit_status(one.run, one.lossless) for one in reports))


def compare(
    a: Annotated[Path, typer.Argument(help="Events of the run before a change.")],
    b: Annotated[Path, typer.Argument(help="Events of the run after it.")],
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            help="Judge only this statistic, and allow it to worsen by at most MOST:"
            " METRIC[:STATISTIC]:MOST, e.g. ttft_s:p90:5% or attainment:0.02 (repeatable)."
        ),
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Compare run B with run A and list the changes with bootstrap intervals.

    The command judges all metrics together, or only the metrics of `--threshold` beyond their
    thresholds. A significantly worse metric gives the exit status 1. Runs that cannot be compared
    give 2, and an INVALID run gives 3.
    """
    with _exit_on_error("cannot compare"):
        thresholds = [parse_threshold(text) for text in threshold or ()]
        found = compare_runs(read_events(a)[0], read_events(b)[0], thresholds)
        Console().print(compare_report.render_comparison(found))
        write_json(json_out, compare_report.comparison_as_dict(found))
    if found.invalid:
        raise typer.Exit(_INVALID)
    raise typer.Exit(REGRESSION if found.regressed else 0)


def sweep(  # noqa: PLR0913, PLR0917 - flags
    servers: Annotated[
        list[str], typer.Argument(help="URL, or several with names: off=http://127.0.0.1:8001 ...")
    ],
    request: RequestFlags,
    server: ServerFlags,
    rates: Annotated[str, typer.Option(help="Requests per second, with commas: 0.5,1,2.")],
    arrival: Annotated[
        str | None, typer.Option(help="Arrival process as in `run`. Default: poisson.")
    ] = None,
    duration: Annotated[float, typer.Option(help="Seconds to send in each cell.")] = 30.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often to run each cell.")] = 1,
    warm_up: Annotated[
        int, typer.Option(min=0, help="Uncounted requests to each server before the first cell.")
    ] = 8,
    events_out: Annotated[
        Path | None,
        typer.Option(
            "--events", help="Folder for the events of each cell. Valid cells are not run again."
        ),
    ] = None,
    json_out: JsonOut = None,
    html_out: HtmlOut = None,
) -> None:
    """Run every rate against every server and mode (`--speculation off,ngram:4`), interleaved.

    Each round has a random order. All targets receive the same requests at the same times for each
    rate. The exit status is the worst of all cells, as in `run`. Ctrl-C and SIGTERM keep the
    completed cells, and give 130 and 143.
    """
    with _exit_on_error("cannot sweep") as interruption:
        modes = request.speculation.split(",") if request.speculation else []
        targets, at = parse_targets(servers, modes), parse_rates(rates)
        unmoded = replace(request, speculation=None)
        base = unmoded.load(rate_rps=at[0], arrival=arrival, duration_s=duration)
        cells = tuple(shuffled_cells(targets, at, rounds, base.seed))
        planned = Sweep(cells, base, server.target(targets[0].url), warm_up, events_out)
        done = interruption.run(run_sweep(planned, Console(stderr=True)))
        if not done:
            raise KeyboardInterrupt
        write_json(json_out, report_sweep(planned, done, html_out))
    if len(done) < len(cells):
        raise typer.Exit(interruption.status)
    raise typer.Exit(worst(exit_status(one.run, None) for _, one in done))


def search(
    url: Url,
    request: RequestFlags,
    wanted: SearchFlags,
    server: ServerFlags,
    rate: Annotated[float, typer.Option(help="The first rate to try, in requests/s.")] = 1.0,
    arrival: Annotated[str | None, typer.Option(help="Arrival process as in `run`.")] = None,
    json_out: JsonOut = None,
    html_out: HtmlOut = None,
) -> None:
    """Find the highest rate at which enough requests meet their SLO.

    The exit status is 0 on success. An interval wider than requested, or only a bound, gives 1. An
    unreachable server or a wrong flag gives 2. A generator that cannot send faster gives 3. Ctrl-C
    and SIGTERM keep the result so far, and give 130 and 143.
    """
    with (
        _exit_on_error(f"cannot search {mask_url(url)}", mask_url(url)) as interruption,
        StepProgress("preparing", "requests") as progress,
    ):

        def print_probe(probed: ProbeResult, result: SearchResult) -> None:
            progress.print(search_report.describe_probe(probed, result))

        load = request.load(rate_rps=rate, arrival=arrival)
        target, goal = server.target(url), wanted.goal()
        found = interruption.run(search_load(load, target, print_probe, progress.report, **goal))
    with _exit_on_error("cannot write the results"):
        Console().print(search_report.render_search(found))
        write_json(json_out, search_report.search_as_dict(found))
        if html_out is not None:
            html_out.write_text(search_report.search_page(found), encoding="utf-8")
    if found.result.stop is StopReason.INTERRUPTED:
        raise typer.Exit(interruption.status)
    if found.result.stop is StopReason.GENERATOR:
        raise typer.Exit(_INVALID)
    raise typer.Exit(0 if found.result.stop is StopReason.PRECISE else ONLY_A_BOUND)


def calibrate(
    processes: Processes = 1,
    probe_s: Annotated[float, typer.Option(help="Seconds of each of about twenty probes.")] = 4.0,
) -> None:
    """Measure how much load this generator can send on this machine, against a stub server."""
    errors = Console(stderr=True)

    def print_probe(probe: CalibrationProbe) -> None:
        verdict = f"not sustained: {probe.reasons[0]}" if probe.reasons else "sustained"
        errors.print(f"{probe.rate_rps:.0f}/s, {probe.open_streams:.0f} open: {verdict}")

    with _exit_on_error("cannot calibrate") as interruption:
        measuring = find_ceilings(processes=processes, probe_s=probe_s, on_probe=print_probe)
        Console().print(render_ceilings(interruption.run(measuring)))


def exit_status(ran: LoadRun, check: LosslessCheck | None) -> int:
    """Return the exit status of a run."""
    fine = {Verdict.OK.value, Verdict.INTERRUPTED.value}
    others = [record for record in ran.records if record.verdict not in fine]
    if not all(record.refused for record in others) or (check is not None and not check.passed):
        return NOT_INTACT
    if invalid_reasons(ran):
        return _INVALID
    return _REFUSED if others else 0


def worst(statuses: Iterable[int]) -> int:
    """Return the worst exit status of several runs."""
    return max(statuses, key=(0, _REFUSED, _INVALID, NOT_INTACT).index, default=0)


def write_json(path: Path | None, value: Any) -> None:
    """Write a value as indented JSON, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def report_sweep(planned: Sweep, done: Done, html_out: Path | None) -> dict[str, Any]:
    """Print the tables of a sweep, write its page, and return its `sweep/1` result."""
    in_order = sorted(done, key=lambda one: (one[1].name, one[0].rate_rps, one[0].round))
    reports = [one for _, one in in_order]
    Console().print(render_side_by_side(reports))
    _write_page(html_out, reports)
    return sweep_as_dict(planned, done)


def _read(named: str) -> RunReport:
    name, given, file = named.rpartition("=")
    path = Path(named if Path(named).exists() else file)
    ran, check = read_events(path)
    return RunReport(name if given and path == Path(file) else name_of(path, ran), ran, check)


def _print_reports(reports: Sequence[RunReport], output: OutputFlags) -> None:
    """Print the tables of runs, and write their results and their page."""
    console = Console()
    alone = reports[0] if len(reports) == 1 else None
    tables = (
        render_side_by_side(reports) if alone is None else render_run(alone.run, alone.lossless)
    )
    console.print(tables)
    if output.tool is not None:
        for one in reports:
            console.print("" if alone else f"\n{one.name}", markup=False)
            console.print(render_as(one.run, output.tool))
    runs = [{"name": r.name, "summary": summarize(r.run, r.lossless)} for r in reports]
    both = {"format": "reports/1", "runs": runs}
    write_json(output.json_out, both if alone is None else runs[0]["summary"])
    _write_page(output.html_out, reports)


def _write_page(path: Path | None, reports: Sequence[RunReport]) -> None:
    if path is not None:
        path.write_text(run_page(reports), encoding="utf-8")


@contextmanager
def _exit_on_error(what: str, url: str = "") -> Iterator[Interruption]:
    """Print an expected error on one line, and exit with the status for wrong usage.

    Args:
        url: the address of the server, which errors of connections name.
    """
    try:
        with interruptible() as interruption:
            yield interruption
    except KeyboardInterrupt:
        typer.echo(f"{what}: interrupted before there was a result", err=True)
        raise typer.Exit(interruption.status) from None
    except aiohttp.ClientConnectionError as error:
        typer.echo(f"cannot reach {url or 'the server'}: {reason(error)}", err=True)
        raise typer.Exit(USAGE) from None
    except (aiohttp.ClientError, ImportError, TimeoutError, OSError, ValueError) as error:
        typer.echo(f"{what}: {reason(error)}", err=True)
        raise typer.Exit(USAGE) from None
