"""Tests of `draftgate bench rag`: equal questions for both policies, with paired differences."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.gateway.rag import body, measure, paired, together
from bench.harness.servers import Server
from draftgate.loadgen.types import Slo
from tests.loadgen.known_records import a_run, failed, record
from tests.loadgen.mock_server import Mock, serving_in_a_thread


def run_with_ttfts(*firsts_s):
    """A run whose questions have these times to the first text, or None for a failed question."""
    slo = Slo(latency_s=1.0)
    return a_run(
        [
            failed(n) if first_s is None else record(n, first_s=first_s, slo=slo)
            for n, first_s in enumerate(firsts_s)
        ]
    )


def test_policies_are_compared_by_question() -> None:
    """The difference `auto` - `off` covers the questions that both policies completed."""
    off = [run_with_ttfts(1.0, 2.0, None), run_with_ttfts(3.0)]
    auto = [run_with_ttfts(0.5, 1.0, 9.0), run_with_ttfts(2.5)]
    report = paired(off, auto, "ttft_s")
    assert report["questions"] == 3
    assert report["mean"] == pytest.approx(-2 / 3)
    assert report["relative"] == pytest.approx(-1 / 3)
    # The deviation of -0.5, -1 and -0.5 is 0.28868, so 1.95996 x 0.28868 / sqrt(3) = 0.32667.
    low, high = report["interval"]
    assert (low, high) == pytest.approx((-2 / 3 - 0.32667, -2 / 3 + 0.32667), abs=1e-4)
    assert paired(off[1:], auto[1:], "ttft_s") is None


def test_attainment_covers_all_rounds() -> None:
    """The attainment covers the questions of all rounds, including failed questions."""
    report = together([run_with_ttfts(0.1, None), run_with_ttfts(0.2, 5.0)])
    assert (report["requests"], report["intact"], report["attainment"]) == (4, 3, 0.5)


@pytest.mark.long
def test_both_policies_get_the_same_questions() -> None:
    """Both servers receive the same questions in each round, in alternating order."""
    args = Namespace(rounds=2, requests=2, rate=50.0, deadline_ms=60_000.0, seed=3)
    off, auto = Mock(), Mock()
    with serving_in_a_thread(off) as one, serving_in_a_thread(auto) as other:
        ports = [int(url.rpartition(":")[2]) for url in (one, other)]
        servers = {name: Server(0, port) for name, port in zip(("off", "auto"), ports, strict=True)}
        report = measure(servers, args)
    assert [(r["policy"], r["round"]) for r in report["rounds"]] == [
        ("off", 0),
        ("auto", 0),
        ("auto", 1),
        ("off", 1),
    ]

    def questions_of(mock: Mock) -> set:
        return {str(b["messages"]) for b in mock.bodies if "messages" in b}

    assert questions_of(off) == questions_of(auto)
    assert report["policies"]["auto"]["requests"] == 4
    assert list(report["policies"]["auto"]["hops"]) == ["plan", "retrieve", "answer"]
    page = "".join(body({"command": "c", "commit": "x", "date": "d", **report}))
    assert "question, 100.0% in time" in page
