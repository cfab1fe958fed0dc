"""Three times more than there is room for, through the gateway's own path in virtual time."""

from __future__ import annotations

import pytest

from bench.simulation.overload_clients import Client, Overload
from bench.simulation.overload_figures import figures, goodput_rps, most_running
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import ServiceLevel

SEATS = 16
CAPACITY_RPS = 16.0
"""About: of 16 seats for chats on an h100-8b."""

CONFIG = WorkerConfig(profile="h100-8b", max_num_seqs=SEATS, max_model_len=16_384)


@pytest.fixture(scope="module")
def overload() -> Overload:
    """A quarter of a minute of chats, of which a third is each of three classes."""
    services = tuple(ServiceLevel(2.0, None, priority) for priority in (-1, 0, 1))
    return Overload(CONFIG, services, seconds=15.0)


@pytest.fixture(scope="module")
def clients(overload: Overload) -> list[Client]:
    """What became of everybody at three times the capacity."""
    return overload.run(3 * CAPACITY_RPS)


def test_everybody_is_answered_in_the_end(clients: list[Client]) -> None:
    """Who comes back when it was told to is let in after a few attempts, whatever its class."""
    assert all(client.end_s is not None for client in clients)
    assert max(len(client.told) for client in clients) < 10


def test_appointments_are_kept(overload: Overload, clients: list[Client]) -> None:
    """At least nine of ten who come back in time are let in; most were refused at first."""
    told = figures(overload, 0.0, clients)
    assert told["refused_at_first"] > 0.4 * len(clients)
    assert told["let_in_on_return"] >= 0.9


def test_who_is_let_in_is_answered_in_time(overload: Overload, clients: list[Client]) -> None:
    """Of those of the better classes at least 95% meet their target after they were let in."""
    for told in figures(overload, 0.0, clients)["classes"][:2]:
        assert told["attainment_of_answered"] >= 0.95


def test_goodput_is_that_of_a_full_pool(overload: Overload, clients: list[Client]) -> None:
    """Refusing costs nobody's turn: the seats stay full."""
    assert most_running(clients) == SEATS
    just_full = overload.run(CAPACITY_RPS)
    assert goodput_rps(overload, clients) >= 0.95 * goodput_rps(overload, just_full)


def test_no_class_starves(overload: Overload, clients: list[Client]) -> None:
    """While the overload lasts some of every class are answered."""
    for told in figures(overload, 0.0, clients)["classes"]:
        assert told["answered_during_overload"] > 0
