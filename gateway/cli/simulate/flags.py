"""The flags of `draftgate simulate`. What it needs is imported when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

BAD_USAGE: Final = 2


def _check_plotly(page: Path | None) -> Path | None:
    from draftgate.loadgen.cli.flags import check_plotly

    return check_plotly(page)


def simulate(  # noqa: PLR0913, PLR0917 - each is a flag
    workload: Annotated[
        str | None,
        typer.Option(help="What is asked: code, chat, long_document, shared_prefix, mixed, rag"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace (Azure, Mooncake, BurstGPT or JSONL)")
    ] = None,
    arrival: Annotated[
        str | None, typer.Option(help="constant, poisson, gamma:CV, onoff[:ON_S,OFF_S]")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, of all workers")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds to send for")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many to send")] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="How many times faster than recorded to replay a trace")
    ] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Promised time to first text")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Promised time per token")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of all requests")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is random")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="Seeds to run, from that one on")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Devices, a worker each")] = 1,
    routing: Annotated[
        str,
        typer.Option(help="What chooses workers: least_cost, least_loaded, prefix_affinity, ..."),
    ] = "least_cost",
    speculation: Annotated[
        list[str] | None,
        typer.Option(help="Policies, with commas or repeated; oracle is one, too (default: auto)"),
    ] = None,
    batching: Annotated[
        str, typer.Option(help="slack, fixed:TOKENS, prefill_first, decode_first")
    ] = "slack",
    profile: Annotated[str, typer.Option(help="Of the device: a shipped name or a file")] = (
        "h100-8b"
    ),
    proposer: Annotated[
        str | None, typer.Option(help="What drafts: ngram (default), draft_model, sparse_self")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences in a batch")] = 256,
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a step")] = 2048,
    max_model_len: Annotated[int, typer.Option(min=2, help="Most tokens of a sequence")] = 32768,
    belief_error: Annotated[
        float,
        typer.Option(min=0.0, max=0.99, help="Share by which costs are believed wrongly"),
    ] = 0.3,
    truth: Annotated[
        str, typer.Option(help="What the device does: roofline (with noise), or just the profile")
    ] = "roofline",
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures here")] = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", callback=_check_plotly, help="Write a page here")
    ] = None,
) -> None:
    """Run a load through dispatcher and schedulers in virtual time, for one or more policies."""
    from draftgate.backends.worker_config import WorkerConfig
    from draftgate.gateway.cli.simulate.command import Output, run_simulate
    from draftgate.gateway.cli.simulate.experiment import Setup
    from draftgate.loadgen.planning.plan import Load
    from draftgate.loadgen.types import Slo

    with refused():
        load = Load(
            workload=workload,
            trace=trace,
            arrival=arrival,
            rate_rps=rate,
            duration_s=duration,
            requests=requests,
            time_scale=time_scale,
            max_tokens=max_tokens,
            temperature=temperature,
            slo=Slo.of_ms(slo_ttft_ms, slo_tpot_ms),
            seed=seed,
        )
        config = WorkerConfig(
            batching=batching,
            proposer=proposer,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            profile=profile,
        )
        setup = Setup(
            load,
            config,
            _listed(speculation or ["auto"]),
            workers,
            routing,
            repeat,
            belief_error,
            truth,
        )
        run_simulate(setup, Output(json_out, html_out))


def _listed(named: list[str]) -> tuple[str, ...]:
    """Return the names between the commas of all texts."""
    return tuple(name for text in named for name in text.split(",") if name)


@contextmanager
def refused() -> Iterator[None]:
    """Say in one line what is wrong, and exit with status 2.

    Raises:
        typer.Exit: a setting is wrong, or a file cannot be used.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        typer.echo(f"draftgate: {error}", err=True)
        raise typer.Exit(BAD_USAGE) from None
