"""Tests of `draftgate bench rag`: equal questions in all arms, with paired differences."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.gateway.rag import ARMS, Arm, body, measure, paired, together
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


def test_arms_are_compared_by_question() -> None:
    """The difference `auto` - `off` covers the questions that both arms completed."""
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


def test_arms_name_policy_agent_and_deadlines() -> None:
    """The default arms differ from the first in one respect, and unknown names are refused."""
    first, *others = map(Arm.parse, ARMS.split(","))
    assert str(first) == "auto:planned:flow"
    differing = [sum(a != b for a, b in zip(first, arm, strict=True)) for arm in others]
    assert differing == [1] * 4
    with pytest.raises(ValueError, match="poetry"):
        Arm.parse("auto:poetry:flow")


@pytest.mark.long
def test_all_arms_get_the_same_questions() -> None:
    """All arms receive the same questions in each round, in alternating order, uncached."""
    names = ["off:planned:flow", "auto:planned:flow", "auto:interleaved:none"]
    models = {"embedding_model": "documents", "query_embedding_model": ""}
    args = Namespace(rounds=2, requests=2, rate=50.0, deadline_ms=60_000.0, seed=3, **models)
    args.arms = [Arm.parse(name) for name in names]
    off, auto = Mock(), Mock()
    with serving_in_a_thread(off) as one, serving_in_a_thread(auto) as other:
        ports = [int(url.rpartition(":")[2]) for url in (one, other)]
        servers = {name: Server(0, port) for name, port in zip(("off", "auto"), ports, strict=True)}
        report = measure(servers, args)
    order = [names.index(r["arm"]) for r in report["rounds"]]
    assert order == [0, 1, 2, 2, 1, 0]

    def answers_of(mock: Mock) -> list[str]:
        texts = (b["messages"][0]["content"] for b in mock.bodies if "messages" in b)
        return [text for text in texts if "Answer the question" in text]

    questions = [{text.rpartition("Question: ")[2] for text in answers_of(m)} for m in (off, auto)]
    assert questions[0] == questions[1]
    starts = [text.partition("\n")[0] for text in answers_of(off) + answers_of(auto)]
    assert {starts.count(start) for start in starts} == {2}
    assert len(set(starts)) == 6
    assert report["arms"]["auto:planned:flow"]["requests"] == 4
    hops = {name: list(arm["hops"]) for name, arm in report["arms"].items()}
    assert hops[names[1]] == ["plan", "retrieve", "answer"]
    assert hops[names[2]] == ["next", "retrieve", "answer"]
    assert report["base"] == names[0]
    assert report["differences"][names[2]]["latency_s"]["questions"] == 4
    page = "".join(body({"command": "c", "commit": "x", "date": "d", **report}))
    assert "question, 100.0% in time" in page
    assert "passage found at 5" in page
