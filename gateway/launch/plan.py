"""The order of each worker, derived from the common settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count, islice
from typing import Final

from msgspec.structs import replace

from draftgate.gateway.config import ConfigError, EffectiveConfig
from draftgate.gateway.processes.messages import Order

_DECIDED: Final = {
    "host": "workers listen at the address of their Ray node",
    "advertise": "workers advertise the address of their Ray node",
    "no_worker": "a gateway does not need Ray: start it with `draftgate serve --no-worker --join`",
    "upstream": "a node with upstreams is a gateway and has no worker for other nodes",
}
"""Settings that the launcher does not accept, with the reason."""

LAST_PORT: Final = 65535


def actor_name(pool: str, number: int) -> str:
    """Return the name of an actor.

    Names of pools contain no slash.
    """
    return f"{pool}/{number}"


def worker_number(pool: str, name: str) -> int | None:
    """Return the number in the name of an actor of this pool, or None for other names."""
    of, _, number = name.rpartition("/")
    return int(number) if of == pool and number.isdecimal() else None


def unused_numbers(taken: Collection[int], workers: int) -> list[int]:
    """Return the smallest numbers that no worker has, so that ports stay in a small range."""
    return list(islice((number for number in count() if number not in taken), workers))


def worker_orders(
    given: EffectiveConfig, numbers: Sequence[int], cpus: float, environ: Mapping[str, str]
) -> dict[str, Order]:
    """Return the order of each worker, by the name of its actor.

    Ports count up from `--port`, so that a worker keeps its id when it restarts on the same
    machine. Each start uses a free port if `--port` is not set. Each worker uses as many threads as
    Ray reserves cores, so that all workers have one numerics class.

    Args:
        numbers: numbers of the workers in the pool, in increasing order.
        cpus: cores per worker.
        environ: environment variables that may hold the peer secret.

    Raises:
        ConfigError: a setting is missing, or not allowed for workers on Ray.
    """
    config, origins = given.config, given.origins
    for name, why in _DECIDED.items():
        if origins[name] != "default":
            raise ConfigError(f"{origins[name]}: {why}")
    if config.join is None:
        raise ConfigError("--join is missing: set the Redis in which gateways find the workers")
    first = 0 if origins["port"] == "default" else config.port
    last = first + max(numbers)
    if last > LAST_PORT:
        raise ConfigError(f"{origins['port']}: the last worker would need port {last}")
    threads = max(1, int(cpus)) if config.threads is None else config.threads
    secret = environ.get(config.peer_secret_env) if config.peer_secret_env else None
    return {
        actor_name(config.pool, number): Order(
            config=replace(config, port=first and first + number, threads=threads), secret=secret
        )
        for number in numbers
    }
