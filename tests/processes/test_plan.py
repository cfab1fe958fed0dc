"""Tests of the settings that each process of a node gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftgate.gateway.config import ConfigError, ServeConfig
from draftgate.gateway.processes.parent import _secret_for, plan_processes
from tests.upstream_settings import at

STORES = Path("/run/stores")


def test_the_fronts_share_a_worker_that_only_this_machine_reaches() -> None:
    """The fronts have no worker, and the worker listens on a loopback address without TLS."""
    given = ServeConfig(
        processes=3, host="0.0.0.0", port=80, tls_certfile="cert.pem", backend="sim"
    )
    plan = plan_processes(given, STORES)
    assert plan.worker is not None
    assert (plan.worker.host, plan.worker.port) == ("127.0.0.1", 0)
    assert plan.worker.tls_certfile is None
    assert not plan.worker.no_worker
    assert [front.no_worker for front in plan.fronts] == [True] * 3
    assert {(front.host, front.port, front.tls_certfile) for front in plan.fronts} == {
        ("0.0.0.0", 80, "cert.pem")
    }
    assert {config.join for config in (plan.worker, *plan.fronts)} == {"local:///run/stores"}


def test_each_front_calls_the_upstreams_itself() -> None:
    """A node with upstreams needs no process of workers."""
    plan = plan_processes(
        ServeConfig(processes=2, backend="openai", upstream=at("http://u")), STORES
    )
    assert plan.worker is None
    assert [front.upstream for front in plan.fronts] == [at("http://u")] * 2
    assert not any(front.no_worker for front in plan.fronts)


def test_every_front_has_an_address_of_its_own() -> None:
    """Upstreams of different fronts have different ids, so that they do not fence each other."""
    plan = plan_processes(
        ServeConfig(processes=4, backend="openai", upstream=at("http://u")), STORES
    )
    assert len({front.advertise for front in plan.fronts}) == 4


def test_the_fronts_of_a_pool_join_its_redis() -> None:
    """Gateways of a pool keep the address of their Redis."""
    redis = "redis://r:6379"
    plan = plan_processes(ServeConfig(processes=2, join=redis, no_worker=True), STORES)
    assert plan.worker is None
    assert [front.join for front in plan.fronts] == [redis] * 2


def test_a_worker_of_a_pool_has_one_process() -> None:
    """A node whose own worker serves a pool cannot have several processes."""
    with pytest.raises(ConfigError, match="--no-worker"):
        plan_processes(ServeConfig(processes=2, join="redis://r:6379"), STORES)


def test_the_processes_of_a_pool_keep_its_secret() -> None:
    """The processes get a secret of their own, unless the pool has one, which they inherit."""
    for settings, expected in (
        ({}, "random"),
        ({"join": "redis://r", "no_worker": True}, "random"),
        ({"join": "redis://r", "no_worker": True, "peer_secret_env": "POOL"}, None),
    ):
        plan = plan_processes(ServeConfig(processes=2, **settings), STORES)
        assert {_secret_for(front, "random") for front in plan.fronts} == {expected}
