"""The settings of each process of a node, derived from the node's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from draftgate.gateway.config import ConfigError, ServeConfig
from draftgate.gateway.state.local.store import SCHEME

SECRET_ENV: Final = "DRAFTGATE_PROCESS_SECRET"
"""The variable with the secret that the processes of a node share."""

_LOOPBACK: Final = "127.0.0.1"


class ProcessPlan(NamedTuple):
    """The settings of the processes.

    Attributes:
        worker: the settings of the process with the workers, or None if they are elsewhere.
        fronts: the settings of each process that clients reach.
    """

    worker: ServeConfig | None
    fronts: tuple[ServeConfig, ...]


def plan_processes(config: ServeConfig, stores: Path) -> ProcessPlan:
    """Return the settings of the processes of a node.

    Args:
        stores: path of the socket of the shared stores.

    Raises:
        ConfigError: the settings do not allow several processes.
    """
    if config.join is not None and not (config.no_worker or config.upstream):
        raise ConfigError(
            "--processes with --join needs --no-worker: start the workers of the pool separately"
        )
    single = replace(config, processes=1)
    if config.join is not None:
        return ProcessPlan(
            None, tuple(_front(single, number) for number in range(config.processes))
        )
    shared = replace(single, join=f"{SCHEME}{stores}", peer_secret_env=SECRET_ENV)
    fronts = tuple(_front(shared, number) for number in range(config.processes))
    if config.upstream:
        return ProcessPlan(None, fronts)
    worker = replace(
        shared,
        host=_LOOPBACK,
        port=0,
        advertise=None,
        tls_certfile=None,
        tls_keyfile=None,
        tls_client_ca_file=None,
    )
    return ProcessPlan(worker, tuple(replace(front, no_worker=True) for front in fronts))


def _front(config: ServeConfig, number: int) -> ServeConfig:
    """Return the settings of a front, which advertises an address of its own.

    No node connects to this address. It only distinguishes the upstreams of the fronts.
    """
    return replace(config, advertise=f"http://{config.host}:{config.port}/{number}")
