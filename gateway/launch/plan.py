"""What each worker is to serve, from the settings of all. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from draftgate.gateway.config import ConfigError, EffectiveConfig
from draftgate.gateway.launch.words import Order

_DECIDED: Final = {
    "host": "workers listen at the address of their Ray node",
    "advertise": "workers advertise the address of their Ray node",
    "no_worker": "a gateway needs no Ray: start it with `draftgate serve --no-worker --join`",
    "upstream": "a node in front of upstreams is a gateway, and has no worker for others",
}
"""Settings that are not the launcher's to give, and why."""

LAST_PORT: Final = 65535


def name_of(pool: str, number: int) -> str:
    """Return the name of an actor of a pool; a pool's own name has no slash in it."""
    return f"{pool}/{number}"


def number_in(pool: str, name: str) -> int | None:
    """Return which of a pool's actors a name means; None if it is none of them."""
    of, _, number = name.rpartition("/")
    return int(number) if of == pool and number.isdecimal() else None


def orders_of(
    given: EffectiveConfig, numbers: Sequence[int], cpus: float, environ: Mapping[str, str]
) -> dict[str, Order]:
    """Return what each worker is to serve, by the name of its actor.

    Ports count up from `--port`, so that a worker which is restarted on the same machine is the
    same to the pool; without it each life takes a free one. Threads are the cores that Ray gives:
    with equal ones all workers are of one numerics class, whatever machines they are on.

    Args:
        numbers: of the workers within the pool, rising.
        cpus: cores of each.
        environ: where the peers' secret is looked for.

    Raises:
        ConfigError: a setting is missing, or not for workers of Ray.
    """
    config, origins = given.config, given.origins
    for name, why in _DECIDED.items():
        if origins[name] != "default":
            raise ConfigError(f"{origins[name]}: {why}")
    if config.join is None:
        raise ConfigError("--join is missing: the Redis in which gateways find the workers")
    first = 0 if origins["port"] == "default" else config.port
    if first + max(numbers) > LAST_PORT:
        raise ConfigError(f"{origins['port']}: there are no {max(numbers)} ports behind {first}")
    threads = max(1, int(cpus)) if config.threads is None else config.threads
    secret = environ.get(config.peer_secret_env) if config.peer_secret_env else None
    return {
        name_of(config.pool, number): Order(
            config=replace(config, port=first and first + number, threads=threads), secret=secret
        )
        for number in numbers
    }
