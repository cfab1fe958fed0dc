"""`draftgate ray`: the workers of a pool as actors of a Ray cluster. Ray is an extra."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Annotated, Any, Final, NoReturn

import typer

from draftgate.gateway.cli.options import config_from, with_settings
from draftgate.gateway.config import EffectiveConfig

FAILED: Final = 1

app = typer.Typer(
    no_args_is_help=True, help="Run a pool's workers on the machines of a Ray cluster."
)

Address = Annotated[
    str, typer.Option(help="The Ray cluster: HOST:PORT, or this machine's", metavar="HOST:PORT")
]
Pool = Annotated[str, typer.Option(help="Name of the pool whose workers are meant")]


@app.command()
@with_settings()
def start(
    settings: dict[str, Any],
    workers: Annotated[int, typer.Option(min=1, help="How many, each a node of its own")] = 1,
    cpus_per_worker: Annotated[
        float, typer.Option(min=0.0, help="Cores that Ray sets aside for each")
    ] = 1.0,
    gpus_per_worker: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="GPUs likewise: 1, a share of one, or none")
    ] = 0.0,
    max_restarts: Annotated[
        int, typer.Option(min=-1, help="How often Ray restarts each; -1 is for ever")
    ] = -1,
    address: Address = "auto",
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once all have joined; `ray stop` ends them")
    ] = False,
) -> None:
    """Start workers that join a pool, and drain them on Ctrl-C or SIGTERM."""
    from draftgate.gateway.launch.messages import Need

    given = config_from(settings)
    need = Need(cpus_per_worker, gpus_per_worker, max_restarts, detach)
    _within(address, lambda: _start(given, workers, need))


@app.command()
def status(address: Address = "auto", pool: Pool = "default") -> None:
    """Say which worker is where, and whether it has joined; exits with 1 if one has not."""
    from draftgate.gateway.launch.launcher import look

    _within(address, lambda: look(_found(pool), _show))


@app.command()
def stop(address: Address = "auto", pool: Pool = "default") -> None:
    """Drain the workers of a pool, and end them; Ctrl-C waits for their streams no longer."""
    from draftgate.gateway.launch.launcher import stop as stop_all

    _within(address, lambda: stop_all(_found(pool), _show))


async def _start(given: EffectiveConfig, workers: int, need: Any) -> bool:
    from draftgate.gateway.launch.launcher import launch
    from draftgate.gateway.launch.plan import orders_of

    cluster = _cluster()
    first = max(cluster.found(given.config.pool), default=-1) + 1
    numbers = range(first, first + workers)
    orders = orders_of(given, numbers, need.cpus, os.environ)
    return await launch(cluster.start(orders, need), _show, detached=need.detached)


def _found(pool: str) -> list[Any]:
    actors = list(_cluster().found(pool).values())
    if not actors:
        _fail(f"the pool {pool!r} has no workers in this Ray cluster")
    return actors


def _within(address: str, work: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Do something with a Ray cluster; exit with 1 if it did not go well."""
    cluster = _cluster()
    try:
        cluster.connect(address)
        fine = asyncio.run(work())
    except (cluster.NoCluster, cluster.NameTaken) as error:
        _fail(str(error))
    finally:
        cluster.disconnect()
    if not fine:
        sys.exit(FAILED)


def _cluster() -> ModuleType:
    """Return the module that speaks with Ray, if Ray is there."""
    try:
        from draftgate.gateway.launch import cluster
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        _fail("Ray is not installed: pip install 'draftgate[ray]'")
    return cluster


def _fail(reason: str) -> NoReturn:
    typer.echo(f"draftgate: {reason}", err=True)
    sys.exit(FAILED)


def _show(line: str) -> None:
    typer.echo(line)
