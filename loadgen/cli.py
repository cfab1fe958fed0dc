"""The commands: send load, measure this generator's own ceiling, report on a run's events.

`python -m loadgen URL` and `draftgate load URL` are the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import aiohttp
import typer
from rich.console import Console
from typer.core import TyperGroup

from loadgen.audit import Verdict
from loadgen.calibrate import Probe
from loadgen.calibrate import calibrate as find_ceilings
from loadgen.calibrate import render as render_ceilings
from loadgen.events import read_events
from loadgen.plan import CONCURRENCY, PROMPT, PROMPT_MAX_TOKENS, REQUESTS, Load
from loadgen.report.table import render
from loadgen.run import Target, run_load
from loadgen.summary import invalid_reasons, summarize
from loadgen.types import Run, Slo
from loadgen.verify import LosslessCheck
from loadgen.workloads import WORKLOADS

NOT_INTACT: Final = 1
NO_USE: Final = 2
INVALID: Final = 3

T = TypeVar("T")


class UrlFirst(TyperGroup):
    """Without the name of a command, what is said is said to `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=UrlFirst,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Send load to a server: give its URL. `run --help` lists the flags.",
)

JsonOut = Annotated[Path | None, typer.Option("--json", help="Write summary/1 here.")]
HtmlOut = Annotated[Path | None, typer.Option("--html", help="Write one page with plots here.")]


@app.command()
def run(  # noqa: PLR0913, PLR0917 - each is a flag
    url: Annotated[str, typer.Argument(help="The server, e.g. http://127.0.0.1:8000.")],
    workload: Annotated[
        str | None, typer.Option(help=f"What to ask: {', '.join(WORKLOADS)}.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace (Azure, Mooncake, BurstGPT or JSONL).")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help=f"Ask only this (without the two above: {PROMPT!r}).")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--completions", help="Endpoint; else as the workload asks."),
    ] = None,
    arrival: Annotated[
        str | None,
        typer.Option(
            help="constant, poisson, gamma:CV, onoff[:ON_S,OFF_S] or ramp:FIRST,LAST[,SECONDS]."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second on a schedule: an open loop.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help=f"Clients of a closed loop ({CONCURRENCY} without --rate)."),
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds to send for.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help=f"How many to send ({REQUESTS} without --duration).")
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="How many times faster than recorded to replay a trace.")
    ] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Promised time to first text.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Promised time per token.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Of an answer; else the workload's ({PROMPT_MAX_TOKENS})."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of all requests.")] = None,
    speculation: Annotated[
        str | None, typer.Option(help="Requested MODE[:K], e.g. off, auto, ngram:4.")
    ] = None,
    verify_lossless: Annotated[
        int, typer.Option(min=0, help="Ask so many again without speculation, and compare.")
    ] = 0,
    text_file: Annotated[
        Path | None, typer.Option(help="Text to ask about, instead of this Python's own.")
    ] = None,
    model: Annotated[str, typer.Option(help="Default: the first the server lists.")] = "",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", show_default=False, help="Bearer token.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, workload and requests.")] = 0,
    timeout_s: Annotated[float, typer.Option(help="Most seconds for one request.")] = 300.0,
    json_out: JsonOut = None,
    html_out: HtmlOut = None,
    events_out: Annotated[
        Path | None, typer.Option("--events", help="Write the run's events (JSON lines) here.")
    ] = None,
) -> None:
    """Send load and check every stream.

    Exit status: 0; 1 if a stream was not intact or a replay differed; 2 if the server cannot be
    reached or the flags make no sense; 3 if the run is INVALID, because this generator did not
    keep up or was interrupted.
    """
    console = Console()
    endpoint: Any = None if chat is None else "chat" if chat else "completions"
    target = Target(url.rstrip("/"), model, api_key, timeout_s, verify_lossless, events_out)
    try:
        load = Load(
            workload=workload,
            trace=trace,
            prompt=prompt,
            arrival=arrival,
            rate_rps=rate,
            duration_s=duration,
            requests=requests,
            concurrency=concurrency,
            time_scale=time_scale,
            max_tokens=max_tokens,
            temperature=temperature,
            speculation=speculation,
            endpoint=endpoint,
            slo=Slo.of_ms(slo_ttft_ms, slo_tpot_ms),
            seed=seed,
            text_file=text_file,
        )
        ran, check = _in_loop(run_load(load, target, Console(stderr=True)))
        _report(console, ran, check, json_out, html_out)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        _refuse(f"cannot load {url}", error)
    raise typer.Exit(exit_status(ran, check))


@app.command()
def report(
    events: Annotated[Path, typer.Argument(help="What `--events` wrote.")],
    json_out: JsonOut = None,
    html_out: HtmlOut = None,
) -> None:
    """Report on the events of a run, as after it; the exit status, too."""
    try:
        ran, check = read_events(events)
        _report(Console(), ran, check, json_out, html_out)
    except (OSError, ValueError) as error:
        _refuse("cannot report", error)
    raise typer.Exit(exit_status(ran, check))


@app.command()
def calibrate(
    probe_s: Annotated[float, typer.Option(help="Seconds of each of some twenty probes.")] = 4.0,
) -> None:
    """Measure how much load one core of this machine holds honestly, against a null server."""
    errors, console = Console(stderr=True), Console()

    def told(probe: Probe) -> None:
        verdict = f"not held: {probe.reasons[0]}" if probe.reasons else "held"
        errors.print(f"{probe.rate_rps:.0f}/s, {probe.open_streams:.0f} open: {verdict}")

    try:
        result = _in_loop(find_ceilings(probe_s=probe_s, on_probe=told))
    except (aiohttp.ClientError, OSError) as error:
        _refuse("cannot calibrate", error)
    console.print(render_ceilings(result))


def exit_status(ran: Run, check: LosslessCheck | None) -> int:
    """Return what a run's end says to a shell."""
    fine = {Verdict.OK.value, Verdict.INTERRUPTED.value}
    if any(record.verdict not in fine for record in ran.records):
        return NOT_INTACT
    if check is not None and not check.passed:
        return NOT_INTACT
    return INVALID if invalid_reasons(ran) else 0


def _report(
    console: Console,
    ran: Run,
    check: LosslessCheck | None,
    json_out: Path | None,
    html_out: Path | None,
) -> None:
    console.print(render(ran, check))
    if json_out is not None:
        summary = json.dumps(summarize(ran, check), indent=2)
        json_out.write_text(summary + "\n", encoding="utf-8")
    if html_out is not None:
        # plotly's bundle of 5 MB is read for this alone.
        from loadgen.report.html import page

        html_out.write_text(page(ran, check), encoding="utf-8")


def _refuse(what: str, error: Exception) -> None:
    Console(stderr=True).print(f"{what}: {type(error).__name__}: {error}", markup=False)
    raise typer.Exit(NO_USE) from None


def _in_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, on uvloop where it is installed: it takes less of the one core."""
    runner: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
    try:
        import uvloop
    except ImportError:
        return runner(main)
    return uvloop.run(main)
