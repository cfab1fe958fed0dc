"""The process that `draftgate serve` runs around a node."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import Final

import typer
import uvloop

from draftgate import __version__
from draftgate.backends.engine.served import THREAD_NAME
from draftgate.backends.types import Task
from draftgate.gateway.app import Listening, NodeFailed, StartError, serve
from draftgate.gateway.cli.loading import loading_shown
from draftgate.gateway.cli.options import BAD_USAGE, fail
from draftgate.gateway.config import ConfigError, ServeConfig
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.node import Node
from draftgate.gateway.processes.parent import serve_processes
from draftgate.gateway.telemetry.logs import configure, log


def run_server(config: ServeConfig) -> None:
    """Serve until a signal arrives.

    The process exits with status 1 and one line on stderr if the node cannot start or loses its
    last worker.
    """
    configure(config.log_level, config.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if config.processes > 1:
                runner.run(serve_processes(config, typer.echo))
            else:
                runner.run(serve(config, lambda node: loading_shown(node, config), show_banner))
    except ConfigError as error:
        fail(error, BAD_USAGE)
    except (StartError, NodeFailed) as error:
        fail(error)
    log(logging.INFO, "stopped")
    _exit_while_loading()


def _exit_while_loading() -> None:
    """Exit with status 0 at once, if the engine still loads.

    The interpreter would otherwise end under the engine's thread, which aborts the process as soon
    as that thread returns from native code.
    """
    if any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def show_banner(where: Listening) -> None:
    """Print the address, the served model and an example request."""
    typer.echo(banner(where))


def banner(where: Listening) -> str:
    """Return the address, the served model and an example request."""
    node = where.node
    described = _upstreams(node) if node.fleet.forwards else _models(node)
    lines = [
        ("API", f"{where.url}/v1"),
        ("live page", f"{where.url}/"),
        *described,
        ("stop", "Ctrl-C waits for open streams; press it twice to stop immediately"),
    ]
    shown = "\n".join(f"  {label:12} {value}" for label, value in lines)
    return f"\nDraftgate {__version__} is ready\n{shown}\n\n{_curl(where.url, node)}\n"


def _models(node: Node) -> list[tuple[str, str]]:
    proposers = ", ".join(node.fleet.proposers) or "none"
    adapters = ", ".join(node.fleet.adapters())
    return [
        *(("model", _described(model, node)) for model in node.models if model.is_known),
        *([("adapters", adapters)] if adapters else []),
        ("speculation", f"{node.policy.name}; proposers: {proposers}"),
    ]


def _described(model: ModelService, node: Node) -> str:
    served, workers = model.served, model.fleet.workers
    elsewhere = model.fleet.size == 0 and node.siblings is None
    where = f"pool {node.config.pool}" if elsewhere else node.config.backend
    several = f", {len(workers)} workers" if len(workers) > 1 else ""
    return f"{served.name} ({where}{several}, {served.max_model_len} tokens of context)"


def _upstreams(node: Node) -> list[tuple[str, str]]:
    addresses = [
        worker.backend.card.root + ("" if worker.backend.failure is None else " (does not respond)")
        for worker in node.fleet.workers
    ]
    return [
        ("model", node.models[0].name or "unknown until an upstream responds"),
        ("upstreams", ", ".join(addresses)),
    ]


_EXAMPLES: Final[Mapping[Task, tuple[str, Mapping[str, object]]]] = {
    Task.GENERATE: (
        "completions",
        {"prompt": "def fibonacci(n):", "max_tokens": 64, "stream": True},
    ),
    Task.EMBED: ("embeddings", {"input": "def fibonacci(n):"}),
    Task.SCORE: (
        "rerank",
        {"query": "a sequence", "documents": ["def fibonacci(n):", "import os"]},
    ),
}
"""The endpoint and the body of a first request, by the task of the model."""


def _curl(url: str, node: Node) -> str:
    """Return a first request as a command, for the first task of the model."""
    task = Task.GENERATE if node.fleet.forwards else node.fleet.card.capabilities.tasks[0]
    path, fields = _EXAMPLES[task]
    body = json.dumps({"model": node.models[0].name, **fields})
    return f"curl -N {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'"
