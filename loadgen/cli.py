"""`python -m loadgen URL`: a closed loop against a server, every stream checked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from loadgen.audit import Verdict
from loadgen.client import Question, Record, first_model
from loadgen.closed_loop import run_closed_loop
from loadgen.summary import drafted_and_accepted, summarize

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def load(  # noqa: PLR0913, PLR0917 - each is a flag
    url: Annotated[str, typer.Argument(help="The server, e.g. http://127.0.0.1:8000.")],
    requests: Annotated[int, typer.Option(min=1, help="How many to send.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "def fibonacci(n):",
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False,
    model: Annotated[str, typer.Option(help="Default: the first the server lists.")] = "",
    seed: Annotated[int, typer.Option(help="Of the first request; each next has one more.")] = 0,
    timeout_s: Annotated[float, typer.Option(help="Most seconds for one request.")] = 300.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write summary/1 here.")] = None,
) -> None:
    """Send requests in a closed loop. Exit code 1 if any stream was not intact."""
    questions = (Question(prompt, max_tokens, seed + i, chat) for i in range(requests))
    try:
        records, elapsed_s = asyncio.run(
            _run(url.rstrip("/"), model, questions, concurrency, timeout_s)
        )
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        Console(stderr=True).print(f"cannot load {url}: {type(error).__name__}: {error}")
        raise typer.Exit(2) from None
    summary = summarize(records, elapsed_s)
    _print(summary, records, elapsed_s)
    if json_out is not None:
        json_out.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if summary["errors"]:
        raise typer.Exit(1)


async def _run(
    url: str, model: str, questions: Iterator[Question], concurrency: int, timeout_s: float
) -> tuple[list[Record], float]:
    records: list[Record] = []
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(timeout_s)
    ) as session:
        model = model or await first_model(session, url)
        start_s = time.monotonic()
        await run_closed_loop(session, url, model, questions, concurrency, records.append)
        return records, time.monotonic() - start_s


def _print(summary: dict[str, Any], records: Sequence[Record], elapsed_s: float) -> None:
    table = Table(show_header=False, box=None)
    completed = summary["requests"] - sum(summary["errors"].values())
    table.add_row("completed", f"{completed} of {summary['requests']} in {elapsed_s:.2f} s")
    for cause, count in summary["errors"].items():
        example = next(r.detail for r in records if r.verdict == Verdict(cause))
        table.add_row(f"failed: {cause}", f"{count}, e.g. {example}", style="red")
    for name in ("ttft", "tpot", "latency"):
        table.add_row(name, _milliseconds(summary[f"{name}_s"]))
    tokens_per_s = summary["accepted_tokens_per_s"]
    table.add_row("tokens/s", "-" if tokens_per_s is None else f"{tokens_per_s:.1f}")
    drafts = drafted_and_accepted(records)
    if drafts is not None:
        drafted, accepted = drafts
        share = f" ({accepted / drafted:.0%})" if drafted else ""
        table.add_row("drafted / accepted", f"{drafted} / {accepted}{share}")
    Console().print(table)


def _milliseconds(figures: dict[str, float] | None) -> str:
    if figures is None:
        return "-"
    return f"p50 {figures['p50'] * 1e3:.1f} ms, p99 {figures['p99'] * 1e3:.1f} ms"
