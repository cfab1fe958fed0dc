"""`draftgate serve`: the process around the node."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import uvloop
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from draftgate import __version__
from draftgate.gateway.app import Listening, NodeFailed, StartError, serve
from draftgate.gateway.cli.loading import loading_shown, stderr
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.logs import configure, log

FAILED = 1
"""Exit status of a node that cannot start, or has lost its last worker."""


def run_server(config: ServeConfig) -> None:
    """Serve until a signal.

    Exits with 1 and one line on stderr if the node cannot start, or once its last worker is lost.
    """
    configure(config.log_level, config.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                serve(config, lambda fleet: loading_shown(fleet, config, stderr()), show_banner)
            )
    except (StartError, NodeFailed) as error:
        sys.stderr.write(f"draftgate: {error}\n")
        sys.exit(FAILED)
    log(logging.INFO, "stopped")


def show_banner(where: Listening) -> None:
    """Say where the node is, what it serves, and how to try it."""
    node = where.node
    lines = Text()
    described = _upstreams(node) if node.fleet.forwards else _model(node)
    for label, value in (("url", f"{where.url}/v1"), *described):
        lines.append(f"{label:12} ", style="dim")
        lines.append(f"{value}\n", style="bold" if label == "url" else "")
    lines.append("stop         ", style="dim")
    lines.append("Ctrl-C lets open streams end; twice stops at once")
    console = Console(highlight=False)
    console.print(
        Panel(lines, title=f"Draftgate {__version__} is ready", expand=False, padding=(0, 2))
    )
    console.print(_curl(where.url, node.model_name), soft_wrap=True, markup=False)
    sys.stdout.flush()


def _model(node: Node) -> list[tuple[str, str]]:
    served, workers = node.served, node.fleet.workers
    proposers = ", ".join(workers[0].backend.load().proposers) or "none"
    several = f", {len(workers)} workers" if len(workers) > 1 else ""
    where = f"pool {node.config.pool}" if node.config.no_worker else node.config.backend
    what = f"{where}{several}, context of {served.max_model_len} tokens"
    return [
        ("model", f"{served.name} ({what})"),
        ("speculation", f"{node.policy.name}; drafts with: {proposers}"),
    ]


def _upstreams(node: Node) -> list[tuple[str, str]]:
    """Say who answers, and which of them do not yet."""
    found = [
        worker.backend.card.root + ("" if worker.backend.failure is None else " (does not answer)")
        for worker in node.fleet.workers
    ]
    return [
        ("model", node.model_name or "unknown until an upstream answers"),
        ("upstreams", ", ".join(found)),
    ]


def _curl(url: str, model: str) -> str:
    body = {"model": model, "prompt": "def fibonacci(n):", "max_tokens": 64, "stream": True}
    return (
        f"curl -N {url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
