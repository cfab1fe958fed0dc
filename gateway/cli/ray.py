"""`draftgate ray`, which runs the workers of a pool as actors of a Ray cluster.

The command requires the extra `ray`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from types import ModuleType
from typing import Annotated, Any, cast

import typer

from draftgate.addresses import read_server_url
from draftgate.gateway.cli.options import BAD_USAGE, FAILED, SettingsCommand, config_from, fail
from draftgate.gateway.config import ConfigError, EffectiveConfig
from draftgate.gateway.config.values import read_list
from draftgate.loadgen.command_line import PlainTyper

app = PlainTyper("Run the workers of a pool on the machines of a Ray cluster.")

Address = Annotated[
    str, typer.Option(help="Address of the Ray cluster.", metavar="HOST:PORT", show_default=True)
]
_Pool = Annotated[str, typer.Option(help="Name of the pool.")]


@app.command(cls=SettingsCommand)
def start(  # noqa: PLR0913, PLR0917 - each is a flag
    context: typer.Context,
    workers: Annotated[int, typer.Option(min=1, help="Number of workers, one node each.")] = 1,
    cpus_per_worker: Annotated[
        float, typer.Option(min=0.0, help="Cores that Ray reserves for each worker.")
    ] = 1.0,
    gpus_per_worker: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="GPUs that Ray reserves for each worker: 1, a fraction, or 0."
        ),
    ] = 0.0,
    max_restarts: Annotated[
        int, typer.Option(min=-1, help="Maximum number of restarts of a worker. -1 means no limit.")
    ] = -1,
    address: Address = "auto",
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Return once all workers have joined. `ray stop` stops them."
        ),
    ] = False,
    max_workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Add up to this number of workers, and drain workers down to --workers, as the "
            "gateways advise.",
        ),
    ] = None,
    gateway: Annotated[
        list[str] | None,
        typer.Option(help="Address of a gateway whose advice --max-workers follows. Repeatable."),
    ] = None,
    gateway_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with a key for /metrics of gateways.")
    ] = None,
) -> None:
    """Start workers that join a pool, and drain them on Ctrl-C or SIGTERM."""
    from draftgate.gateway.launch.messages import Resources

    given = config_from(context)
    need = Resources(cpus_per_worker, gpus_per_worker, max_restarts, detach)
    if (max_workers is None) != (not gateway):
        fail("--max-workers and --gateway need each other", BAD_USAGE)
    if max_workers is not None and (max_workers < workers or detach):
        fail("--max-workers must be at least --workers, and excludes --detach", BAD_USAGE)
    try:
        gateways = [read_server_url(str(url)) for url in cast(list[str], read_list(gateway or []))]
    except ValueError as error:
        fail(f"--gateway: {error}", BAD_USAGE)
    key = None if gateway_key_env is None else os.environ.get(gateway_key_env)
    _run(address, lambda: _start(given, workers, need, max_workers, gateways, key))


@app.command()
def status(address: Address = "auto", pool: _Pool = "default") -> None:
    """Show the machine and state of each worker.

    The exit status is 1 if a worker has not joined.
    """
    from draftgate.gateway.launch.launcher import show_status

    _run(address, lambda: show_status(_actors(pool), typer.echo))


@app.command()
def stop(address: Address = "auto", pool: _Pool = "default") -> None:
    """Drain and stop the workers of a pool.

    Ctrl-C stops them without waiting for open streams.
    """
    from draftgate.gateway.launch.launcher import stop as stop_all

    _run(address, lambda: stop_all(_actors(pool), typer.echo))


async def _start(
    given: EffectiveConfig,
    workers: int,
    need: Any,
    max_workers: int | None,
    gateways: Sequence[str],
    key: str | None,
) -> bool:
    from draftgate.gateway.launch.advice import GatewayAdvice, PoolLimits
    from draftgate.gateway.launch.launcher import PoolScaling, launch
    from draftgate.gateway.launch.plan import unused_numbers, worker_orders

    cluster, pool = _cluster(), given.config.pool

    def add(number: int) -> list[Any]:
        numbers = unused_numbers(cluster.find_actors(pool), number)
        orders = worker_orders(given, numbers, need.cpus, os.environ)
        return list(cluster.start(orders, need))

    def add_more(number: int) -> list[Any]:
        try:
            return add(number)
        except (ConfigError, cluster.NameTaken) as error:  # the present workers must go on
            typer.echo(f"cannot add workers: {error}")
            return []

    scaling = None
    if max_workers is not None:
        advice = GatewayAdvice(gateways, pool, key, typer.echo)
        scaling = PoolScaling(PoolLimits(workers, max_workers), advice.read, add_more)
    actors = add(workers)
    return await launch(actors, typer.echo, detached=need.detached, scaling=scaling)


def _actors(pool: str) -> list[Any]:
    actors = list(_cluster().find_actors(pool).values())
    if not actors:
        fail(f"the pool {pool!r} has no workers in this Ray cluster")
    return actors


def _run(address: str, work: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Connect to a Ray cluster, run the work, and exit with status 1 if it fails."""
    import asyncio

    cluster = _cluster()
    try:
        cluster.connect(address)
        succeeded = asyncio.run(work())
    except ConfigError as error:
        fail(error, BAD_USAGE)
    except (cluster.NoCluster, cluster.NameTaken) as error:
        fail(error)
    finally:
        cluster.disconnect()
    if not succeeded:
        raise typer.Exit(FAILED)


def _cluster() -> ModuleType:
    """Return the module `launch.cluster`, or exit if Ray is not installed."""
    try:
        from draftgate.gateway.launch import cluster
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        fail("Ray is not installed: pip install 'draftgate[ray]'")
    return cluster
