"""An overload of three times the capacity, through the gateway's own path in virtual time."""

from __future__ import annotations

import pytest

from bench.simulation.overload_clients import Client, Overload
from bench.simulation.overload_figures import figures, goodput_rps, most_running
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import ServiceLevel

SEATS = 16
CAPACITY_RPS = 16.0
"""Approximate capacity of 16 sequences for chats on an h100-8b."""

CONFIG = WorkerConfig(profile="h100-8b", max_num_seqs=SEATS, max_model_len=16_384)


@pytest.fixture(scope="module")
def overload() -> Overload:
    """15 seconds of chats, a third of them in each of three classes."""
    services = tuple(ServiceLevel(2.0, None, priority) for priority in (-1, 0, 1))
    return Overload(CONFIG, services, seconds=15.0)


@pytest.fixture(scope="module")
def clients(overload: Overload) -> list[Client]:
    """The outcomes of all clients at three times the capacity."""
    return overload.run(3 * CAPACITY_RPS)


def test_every_client_is_answered_in_the_end(clients: list[Client]) -> None:
    """A client that retries as instructed is admitted after a few attempts, whatever its class."""
    assert all(client.end_s is not None for client in clients)
    assert max(len(client.told) for client in clients) < 10


def test_timely_retries_are_admitted(overload: Overload, clients: list[Client]) -> None:
    """At least 90% of timely retries are admitted; most clients were refused at first."""
    told = figures(overload, 0.0, clients)
    assert told["refused_at_first"] > 0.4 * len(clients)
    assert told["let_in_on_return"] >= 0.9


def test_admitted_requests_meet_their_target(overload: Overload, clients: list[Client]) -> None:
    """At least 95% of the admitted requests of the higher classes meet their target."""
    for told in figures(overload, 0.0, clients)["classes"][:2]:
        assert told["attainment_of_answered"] >= 0.95


def test_goodput_stays_at_capacity(overload: Overload, clients: list[Client]) -> None:
    """Refusals leave no sequence idle."""
    assert most_running(clients) == SEATS
    just_full = overload.run(CAPACITY_RPS)
    assert goodput_rps(overload, clients) >= 0.95 * goodput_rps(overload, just_full)


def test_no_class_starves(overload: Overload, clients: list[Client]) -> None:
    """During the overload, some requests of every class are answered."""
    for told in figures(overload, 0.0, clients)["classes"]:
        assert told["answered_during_overload"] > 0
