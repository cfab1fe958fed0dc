"""Tests of an overload of three times the capacity, through the gateway's code in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulation.overload_clients import Client, Overload
from bench.simulation.overload_metrics import goodput_rps, most_running, overload_metrics
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import ServiceLevel

SEATS = 16
CAPACITY_RPS = 16.0
"""Approximate capacity of 16 sequences for chats on an h100-8b."""

LEAST_GOODPUT_RATIO = 0.8
"""Least goodput of the overload over the goodput at capacity.

Fifteen seconds hold about 180 completions of very unequal lengths. Over the seeds 0 to 9, the ratio
is 0.96 with a standard deviation of 0.06. Without admission control, the ratio is 0.4 to 0.5.
"""

CONFIG = WorkerConfig(profile="h100-8b", max_num_seqs=SEATS, max_model_len=16_384)


@pytest.fixture(scope="module")
def overload(tmp_path_factory: pytest.TempPathFactory) -> Overload:
    """15 seconds of chats, one third in each of three classes.

    The text is the same everywhere, but Python's standard library differs between versions.
    """
    text_file = tmp_path_factory.mktemp("text") / "text.txt"
    text_file.write_text("".join(f"Question {n} is about number {n * n}.\n" for n in range(9000)))
    services = tuple(ServiceLevel(2.0, None, priority) for priority in (-1, 0, 1))
    return Overload(CONFIG, services, seconds=15.0, text_file=text_file)


@pytest.fixture(scope="module")
def clients(overload: Overload) -> list[Client]:
    """The outcomes of all clients at three times the capacity."""
    return overload.run(3 * CAPACITY_RPS)


def test_every_client_gets_a_response_in_the_end(clients: list[Client]) -> None:
    """Every client that retries as instructed receives a response after a few attempts."""
    assert all(client.end_s is not None for client in clients)
    assert max(len(client.refusals) for client in clients) < 10


def test_timely_retries_are_admitted(overload: Overload, clients: list[Client]) -> None:
    """The server first refuses most clients and later admits most timely retries.

    It refuses retries of lower classes again while the highest class fills the server.
    """
    row = overload_metrics(overload, 0.0, clients)
    assert row["refused_at_first"] > 0.4 * len(clients)
    assert row["let_in_on_return"] >= 0.6
    assert row["classes"][0]["let_in_on_return"] >= 0.9


def test_admitted_requests_meet_their_target(overload: Overload, clients: list[Client]) -> None:
    """At least 95% of the admitted requests of the higher classes meet their target."""
    for row in overload_metrics(overload, 0.0, clients)["classes"][:2]:
        assert row["attainment_of_answered"] >= 0.95


def test_goodput_stays_at_capacity(overload: Overload, clients: list[Client]) -> None:
    """The server keeps every sequence busy, and its goodput stays at capacity."""
    assert most_running(clients) == SEATS
    just_full = overload.run(CAPACITY_RPS)
    goodput_ratio = goodput_rps(overload, clients) / goodput_rps(overload, just_full)
    assert goodput_ratio >= LEAST_GOODPUT_RATIO


def check_not_idle(overload: Overload, clients: list[Client], most_unused: float) -> None:
    """Assert that a request runs at any time, and that the delays are not too long."""
    row = overload_metrics(overload, 0.0, clients)
    assert row["while_clients_wait"]["idle_s"] < 1.0
    assert row["while_clients_wait"]["unused_share"] < most_unused
    assert row["retry_over_earliest"] <= 1.5
    assert all(client.end_s is not None for client in clients)


def test_server_is_not_idle_while_clients_of_three_classes_wait(
    overload: Overload, clients: list[Client]
) -> None:
    """A request runs at any time, and the delays are at most 1.5 times the earliest ones.

    The end of a short overload is a larger part of it, so three classes leave more time unused.
    """
    check_not_idle(overload, clients, 0.15)


@pytest.mark.long
@pytest.mark.parametrize(
    ("priorities", "times", "seconds", "most_unused"),
    [((0,), 3, 15.0, 0.1), ((0,), 24, 5.0, 0.1), ((-1, 0, 1), 24, 5.0, 0.15)],
)
def test_server_is_not_idle_while_clients_wait(
    overload: Overload,
    times: int,
    seconds: float,
    priorities: tuple[int, ...],
    most_unused: float,
) -> None:
    """The same holds for a single class, and for 24 times the capacity."""
    services = tuple(ServiceLevel(2.0, None, priority) for priority in priorities)
    changed = replace(overload, services=services, seconds=seconds)
    check_not_idle(changed, changed.run(times * CAPACITY_RPS), most_unused)


@pytest.mark.long
def test_two_gateways_promise_the_server_once(overload: Overload) -> None:
    """Two gateways in front of a server keep it busy, and their delays are at most 1.5 times the
    earliest ones."""
    changed = replace(overload, services=(ServiceLevel(2.0, None, 0),), gateways=2)
    clients = changed.run(3 * CAPACITY_RPS)
    check_not_idle(changed, clients, 0.1)
    assert overload_metrics(changed, 0.0, clients)["let_in_on_return"] >= 0.85


def test_no_class_starves(overload: Overload, clients: list[Client]) -> None:
    """The server completes some requests of every class during the overload."""
    for row in overload_metrics(overload, 0.0, clients)["classes"]:
        assert row["answered_during_overload"] > 0
