"""`draftgate bench rag`: the same questions for both policies, with paired differences."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.gateway.rag import body, measure, paired, together
from bench.harness.servers import Server
from draftgate.loadgen.types import Slo
from tests.loadgen.known_records import a_run, failed, record
from tests.loadgen.mock_server import Mock, serving_in_a_thread


def of_latencies(*firsts_s):
    """A run whose questions have these times to the first text; None failed."""
    slo = Slo(latency_s=1.0)
    return a_run(
        [
            failed(n) if first_s is None else record(n, first_s=first_s, slo=slo)
            for n, first_s in enumerate(firsts_s)
        ]
    )


def test_policies_are_compared_by_question() -> None:
    """The difference `auto` - `off` covers the questions that both answered, with its interval."""
    off = [of_latencies(1.0, 2.0, None), of_latencies(3.0)]
    auto = [of_latencies(0.5, 1.0, 9.0), of_latencies(2.5)]
    told = paired(off, auto, "ttft_s")
    assert told["questions"] == 3
    assert told["mean"] == pytest.approx(-2 / 3)
    assert told["relative"] == pytest.approx(-1 / 3)
    # The deviation of -0.5, -1 and -0.5 is 0.28868; 1.95996 x 0.28868 / sqrt(3) = 0.32667.
    low, high = told["interval"]
    assert (low, high) == pytest.approx((-2 / 3 - 0.32667, -2 / 3 + 0.32667), abs=1e-4)
    assert paired(off[1:], auto[1:], "ttft_s") is None


def test_attainment_covers_all_rounds() -> None:
    """Attainment covers the questions of all rounds, including failed ones."""
    told = together([of_latencies(0.1, None), of_latencies(0.2, 5.0)])
    assert (told["requests"], told["intact"], told["attainment"]) == (4, 3, 0.5)


@pytest.mark.long
def test_both_policies_get_the_same_questions() -> None:
    """In each round, both real servers get the same questions in turn."""
    args = Namespace(rounds=2, requests=2, rate=50.0, deadline_ms=60_000.0, seed=3)
    off, auto = Mock(), Mock()
    with serving_in_a_thread(off) as one, serving_in_a_thread(auto) as other:
        ports = [int(url.rpartition(":")[2]) for url in (one, other)]
        servers = {name: Server(0, port) for name, port in zip(("off", "auto"), ports, strict=True)}
        told = measure(servers, args)
    assert [(r["policy"], r["round"]) for r in told["rounds"]] == [
        ("off", 0),
        ("auto", 0),
        ("auto", 1),
        ("off", 1),
    ]

    def asked(mock: Mock) -> set:
        return {str(b["messages"]) for b in mock.bodies if "messages" in b}

    assert asked(off) == asked(auto)
    assert told["policies"]["auto"]["requests"] == 4
    assert list(told["policies"]["auto"]["hops"]) == ["plan", "retrieve", "answer"]
    page = "".join(body({"command": "c", "commit": "x", "date": "d", **told}))
    assert "question, 100.0% in time" in page
