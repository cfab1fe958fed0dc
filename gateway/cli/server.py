"""The process that `draftgate serve` runs around a node."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from functools import partial

import typer
import uvloop

from draftgate.backends.engine.served import THREAD_NAME
from draftgate.gateway.app import Listening, NodeFailed, StartError, serve
from draftgate.gateway.banner import banner
from draftgate.gateway.cli.options import BAD_USAGE, fail
from draftgate.gateway.config import ConfigError, ServeConfig
from draftgate.gateway.loading import loading_shown
from draftgate.gateway.logs import configure, flush, log
from draftgate.gateway.processes.messages import Notice
from draftgate.gateway.processes.parent import serve_processes


def run_server(config: ServeConfig) -> None:
    """Serve until a signal arrives.

    The process exits with status 1 and one line on stderr if the node cannot start or loses its
    last worker.
    """
    configure(config.log_level, config.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if config.processes > 1:
                runner.run(serve_processes(config, partial(_show, config)))
            else:
                on_ready = partial(show_banner, config)
                runner.run(serve(config, lambda node: loading_shown(node, config), on_ready))
    except ConfigError as error:
        fail(error, BAD_USAGE)
    except (StartError, NodeFailed) as error:
        flush()
        fail(error)
    log(logging.INFO, "stopped")
    exit_while_loading(0)


def exit_while_loading(status: int) -> None:
    """Exit at once with a status, if the engine still loads.

    The interpreter would otherwise end under the engine's thread, which aborts the process as soon
    as that thread returns from native code.
    """
    if any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)


def show_banner(config: ServeConfig, where: Listening) -> None:
    """Print the address, the served model and an example request, or log the address as JSON."""
    _show(config, Notice(where.url, banner=banner(where)))


def _show(config: ServeConfig, notice: Notice) -> None:
    """Print the banner of a node. If programs read the output, log only its address."""
    if config.log_format == "json":
        log(logging.INFO, "listening", url=notice.url)
    else:
        typer.echo(notice.banner)
