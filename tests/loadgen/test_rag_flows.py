"""Tests of `rag`: splitting a deadline, parsing plans, the passage index, and whole flows."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from random import Random

import pytest

from draftgate.loadgen.measuring.hops import summarize_hops
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.sending.client import OpenAIClient, open_session
from draftgate.loadgen.sending.driver import run_plan
from draftgate.loadgen.sending.passage_index import PassageIndex, build_index
from draftgate.loadgen.types import Slo
from draftgate.loadgen.workloads.base import TokenEstimator, WorkloadSettings
from draftgate.loadgen.workloads.deadline import (
    LEAST_S,
    PROMPT_TOKENS_PER_OUTPUT,
    WAITING,
    RequestWork,
    split_deadline,
)
from draftgate.loadgen.workloads.rag import (
    BEGUN_TOKENS,
    DEADLINE_S,
    INDEXED,
    INSTRUCTION,
    MOST_QUERIES,
    PASSAGE_TOKENS,
    PASSAGES,
    PLAN_SCHEMA,
    QUERY_CHARACTERS,
    indexed_passages,
    parse_queries,
)
from tests.loadgen import mock_server
from tests.loadgen.mock_server import Mock, Script, serving, serving_in_a_thread, vector_of
from tests.loadgen.test_cli import command

COUNTER = TokenEstimator(4.0)
PLANNED = Script(plan=json.dumps({"queries": ["alpha beta", "gamma"]}))


@pytest.mark.parametrize("seed", range(50))
def test_a_hop_announces_its_share_of_the_deadline(seed: int) -> None:
    """TTFT + (n - 1) TPOT is the hop's share of the remaining time, by its share of the work."""
    rng = Random(seed)
    work, *later = (RequestWork(rng.randrange(1, 4000), rng.randrange(2, 600)) for _ in range(3))
    deadline_s, elapsed_s = rng.uniform(5, 20), rng.uniform(0, 4)
    slo = split_deadline(Slo(latency_s=deadline_s), elapsed_s, work, later)
    units = [
        WAITING + w.prompt_tokens / PROMPT_TOKENS_PER_OUTPUT + w.output_tokens
        for w in (work, *later)
    ]
    budget_s = (deadline_s - elapsed_s) * units[0] / sum(units)
    assert slo.ttft_s + (work.output_tokens - 1) * slo.tpot_s == pytest.approx(budget_s)
    assert slo.latency_s is None


def test_hops_that_take_their_announced_time_end_at_the_deadline() -> None:
    """The flow ends at the deadline if each hop takes its announced time."""
    works, at_s, paces = [RequestWork(60, 32), RequestWork(40), RequestWork(1400, 129)], 0.0, []
    for place, work in enumerate(works):
        slo = split_deadline(Slo(latency_s=10.0), at_s, work, works[place + 1 :])
        at_s += slo.ttft_s + (work.output_tokens - 1) * (slo.tpot_s or 0.0)
        paces += [] if slo.tpot_s is None else [slo.tpot_s]
    assert at_s == pytest.approx(10.0)
    assert paces == pytest.approx([paces[0]] * 2)


def test_saved_time_goes_to_later_hops() -> None:
    """A hop announces more time if the client sends the hop earlier."""
    work, promise = RequestWork(100, 50), Slo(latency_s=10.0)
    limits = [split_deadline(promise, s, work).tpot_s for s in (1.0, 2.0, 9.0)]
    assert limits == sorted(limits, reverse=True)


@pytest.mark.parametrize("elapsed_s", [9.9999, 10.0, 50.0])
def test_a_late_hop_announces_the_minimum(elapsed_s: float) -> None:
    """The announced limits stay positive after the deadline."""
    slo = split_deadline(Slo(latency_s=10.0), elapsed_s, RequestWork(20, 9), ())
    units = WAITING + 1 + 9
    assert slo.tpot_s == pytest.approx(LEAST_S / units)
    assert slo.ttft_s == pytest.approx((WAITING + 2) * LEAST_S / units)


def test_embeddings_announce_only_a_ttft() -> None:
    """Embeddings announce their whole share as a TTFT."""
    slo = split_deadline(Slo(latency_s=3.0), 0.0, RequestWork(40), [RequestWork(40)])
    assert slo == Slo(ttft_s=pytest.approx(1.5))


def test_the_last_hop_keeps_the_users_limits() -> None:
    """Only the last hop keeps the user's own TTFT and TPOT where they are tighter."""
    work, promise = RequestWork(20, 9), Slo(ttft_s=1.5, tpot_s=0.01, latency_s=10.0)
    assert split_deadline(promise, 1.0, work) == Slo(pytest.approx(0.5), 0.01)
    assert split_deadline(promise, 9.9, work).tpot_s < 0.01
    units = WAITING + 1 + 9
    assert split_deadline(promise, 1.0, work, [work]).tpot_s == pytest.approx(9 / (2 * units))
    plain = replace(promise, latency_s=None)
    assert split_deadline(plain, 1.0, work) == Slo(pytest.approx(0.5), 0.01)
    assert split_deadline(plain, 1.0, work, [work]) == split_deadline(Slo(), 1.0, work) == Slo()


@pytest.mark.parametrize(
    ("text", "queries"),
    [
        ('{"queries": ["a b", "c"]}', ("a b", "c")),
        ('{"queries": [" a ", "", "  "]}', ("a",)),
        ('{"queries": ["a"], "more": 1}', ("a",)),
        ('{"queries": ["a", "b", "c"]}', ("a", "b")),
        (json.dumps({"queries": ["x" * 99]}), ("x" * QUERY_CHARACTERS,)),
        ('{"queries": ["a b", "c', ()),
        ('{"queries": []}', ()),
        ('{"queries": [1]}', ()),
        ('{"queries": "a"}', ()),
        ('["a"]', ()),
        ("The plan is to search.", ()),
        ("", ()),
    ],
)
def test_queries_are_parsed_only_from_valid_plans(text: str, queries) -> None:
    """An invalid or truncated plan has no queries, and queries are limited in number and length."""
    assert parse_queries(text) == queries
    assert len(queries) <= MOST_QUERIES


def indexed_passages_of(path):
    """Return the passages of an index of a text file."""
    return indexed_passages(WorkloadSettings(0, COUNTER, open_corpus(path)))


def packed(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def test_the_index_finds_the_nearest_by_cosine() -> None:
    """The result equals a brute-force search that uses the best of several query vectors."""
    rng = Random(3)
    rows = [[rng.gauss(0, 1) for _ in range(8)] for _ in range(40)]
    index = PassageIndex([f"passage {n}" for n in range(40)], [packed(*row) for row in rows])

    def cosine(a, b) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    for _ in range(20):
        queries = [[rng.gauss(0, 5) for _ in range(8)] for _ in range(2)]
        best = {n: max(cosine(row, query) for query in queries) for n, row in enumerate(rows)}
        wanted = sorted(best, key=lambda n: -best[n])[:5]
        assert index.nearest([packed(*query) for query in queries], 5) == wanted


def test_of_equal_passages_the_more_popular_comes_first() -> None:
    """The index keeps the order of the collection for ties and for a zero vector."""
    index = PassageIndex(["a", "b", "c"], [packed(1, 0), packed(0, 1), packed(0, 3)])
    assert index.nearest([packed(0, 2)], 3) == [1, 2, 0]
    assert index.nearest([packed(0, 0)], 2) == [0, 1]


def test_passages_are_found_by_rare_words() -> None:
    """The passage that shares the rarest words is first.

    A word in all passages has no weight.
    """
    texts = ["the cat sat", "the dog ran", "the dog slept"]
    index = PassageIndex(texts, [packed(1.0)] * 3)
    assert index.by_words("The CAT?", 1) == [0]
    assert index.by_words("the dog slept", 3) == [2, 1, 0]
    assert index.by_words("the unheard", 3) == [0, 1, 2]


@pytest.mark.parametrize("passages", [[], ["a"], ["a", "b", "c"]])
def test_an_index_needs_a_vector_for_each_passage(passages) -> None:
    """The index rejects any other number of vectors."""
    with pytest.raises(ValueError, match="vectors"):
        PassageIndex(passages, [packed(1.0)] * 2)


async def test_an_index_is_built_once() -> None:
    """A second index of the same passages at the same server sends no request."""
    mock, passages = Mock(), [f"passage {n}" for n in range(40)]
    async with serving(mock) as url, open_session() as session:
        client = OpenAIClient(session, url, "mock")
        index = await build_index(client, passages)
        requests = len(mock.bodies)
        assert await build_index(client, passages) is index
        assert len(mock.bodies) == requests
        other = await build_index(client, passages[1:])
    assert index.nearest([packed(*vector_of("passage 33"))], 1) == [33]
    assert len(other.passages) == 39


def test_the_collection_is_the_same_for_every_load(tmp_path) -> None:
    """The passages have the expected number and length, and do not change."""
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"{n} mine\n" for n in range(9999)))
    passages = indexed_passages_of(path)
    assert len(passages) == INDEXED
    assert {COUNTER.count(passage) for passage in passages} == {PASSAGE_TOKENS}
    assert passages == indexed_passages_of(path)


def test_a_question_always_has_a_subject(tmp_path) -> None:
    """Even blank passages give a subject, because servers embed no empty text."""
    path = tmp_path / "sparse.txt"
    path.write_text(f"one word{' ' * 900}\n" * 500)
    index = PassageIndex(indexed_passages_of(path), [packed(1.0)] * INDEXED)
    load = Load(workload="rag", rate_rps=1.0, requests=200, text_file=path)
    for planned in make_plan(load, counter=COUNTER, retriever=index).requests:
        assert planned.flow.subject.strip()


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """Write words that rarely repeat, so that their counts find a passage."""
    rng, path = Random(0), tmp_path_factory.mktemp("text") / "words.txt"
    words = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(100_000)]
    path.write_text("".join(f"{word}\n" for word in words))
    return path


async def run_questions(
    text_file, mock: Mock, script: Script = PLANNED, *, count: int = 4, **fields
):
    """Run some questions and return the run and their flows.

    The mock records only the requests after the index.
    """
    load = Load(workload="rag", concurrency=1, requests=count, text_file=text_file, **fields)
    passages = indexed_passages_of(text_file)
    async with serving(mock) as url, open_session() as session:
        client = OpenAIClient(session, url, "mock")
        index = await build_index(client, passages)
        mock.bodies.clear()
        mock.headers.clear()
        plan = [
            replace(p, request=replace(p.request, extra=(("mock", vars(script)), *p.request.extra)))
            for p in make_plan(load, counter=COUNTER, retriever=index).requests
        ]
        run = await run_plan(OpenAIClient(session, url, "mock"), plan, concurrency=1)
    return run, [p.flow for p in plan]


async def test_a_question_is_planned_retrieved_and_answered(text_file) -> None:
    """The flow sends a plan, embeddings and a final request over five passages."""
    mock = Mock()
    run, _ = await run_questions(text_file, mock)
    assert [r.verdict for r in run.records] == ["ok"] * 4
    plan, retrieval, answer = mock.bodies[:3]
    assert plan["response_format"]["json_schema"]["schema"] == PLAN_SCHEMA
    subject, *queries = retrieval["input"]
    assert queries == ["alpha beta", "gamma"]
    assert len(subject) <= 4 * BEGUN_TOKENS
    content = answer["messages"][0]["content"]
    assert content.startswith(INSTRUCTION)
    assert f"[{PASSAGES}] " in content
    assert content.endswith(f'Question: what is said about "{subject}"?')
    assert "response_format" not in answer
    assert {"plan", "retrieve", "answer"} == {hop.name for hop in summarize_hops(run.records)}
    facts = {
        name: value for hop in summarize_hops(run.records) for name, value in hop.facts.items()
    }
    assert facts == dict.fromkeys(("plan_parsed", "passage_found", "by_vectors"), (4, 4))
    for place in range(0, 12, 3):
        subject = mock.bodies[place + 1]["input"][0]
        shown = mock.bodies[place + 2]["messages"][0]["content"].removesuffix(f'"{subject}"?')
        assert subject in " ".join(shown.split())


async def test_missed_passages_are_reported(text_file, monkeypatch) -> None:
    """The report counts how often equal vectors found the right passage by chance."""
    monkeypatch.setattr(mock_server, "vector_of", lambda _: [1.0])
    run, flows = await run_questions(text_file, Mock(), count=12)
    right = sum(flow.about < PASSAGES for flow in flows)
    (answers,) = [hop for hop in summarize_hops(run.records) if hop.name == "answer"]
    assert answers.facts["passage_found"] == (right, 12)
    assert 0 < right < 12


async def test_every_hop_announces_a_share_of_one_deadline(text_file) -> None:
    """The headers match the split of the remaining time, by default of ten seconds."""
    mock = Mock()
    run, _ = await run_questions(text_file, mock, count=2)
    for record in run.records:
        assert record.planned.request.slo == Slo(latency_s=DEADLINE_S)
        plan, retrieval, answer = (hop.planned.request for hop in record.hops)
        elapsed_s = record.hops[2].scheduled_s - record.scheduled_s
        work = RequestWork(COUNTER.count(answer.messages[0].content), answer.max_tokens)
        least = split_deadline(Slo(latency_s=DEADLINE_S), elapsed_s, work)
        assert answer.slo.tpot_s == pytest.approx(least.tpot_s, rel=0.02)
        assert 0 < plan.slo.ttft_s < DEADLINE_S / 3 > retrieval.slo.ttft_s > 0
        assert retrieval.slo.tpot_s is None
    headers = mock.headers[2]
    assert float(headers["x-slo-tpot-ms"]) == pytest.approx(
        run.records[0].hops[2].planned.request.slo.tpot_s * 1e3, rel=1e-4
    )
    assert "x-slo-tpot-ms" not in mock.headers[1]


@pytest.mark.parametrize("script", [Script(), Script(plan='{"queries": ["cut'), Script(tokens=1)])
async def test_without_a_plan_the_subject_is_searched(text_file, script) -> None:
    """A response without a plan fails no request, and the report counts the missing plan."""
    mock = Mock()
    run, _ = await run_questions(text_file, mock, script)
    assert [r.verdict for r in run.records] == ["ok"] * 4
    assert [len(body["input"]) for body in mock.bodies[1::3]] == [1] * 4
    facts = {
        name: value for hop in summarize_hops(run.records) for name, value in hop.facts.items()
    }
    assert facts["plan_parsed"] == (0, 4)
    assert facts["passage_found"][0] == 4


async def test_without_vectors_passages_are_found_by_words(text_file) -> None:
    """The flow fails if embeddings fail, but the user gets a response over matching passages."""
    batches = -(-INDEXED // 32)
    run, _ = await run_questions(text_file, Mock(embeds=batches + 1), count=3)
    assert [r.verdict for r in run.records] == ["ok", "http_status", "http_status"]
    assert run.records[1].detail.startswith("retrieve: 404")
    answers = [dict(r.hops[2].planned.request.facts) for r in run.records]
    assert [value["by_vectors"] for value in answers] == [True, False, False]
    assert all(value["passage_found"] for value in answers[1:])
    assert [r.hops[2].verdict for r in run.records] == ["ok"] * 3


async def test_flags_reach_plan_and_answer(text_file) -> None:
    """Speculation, temperature and endpoint apply to both chat requests, not to embeddings."""
    mock = Mock()
    await run_questions(
        text_file, mock, count=1, speculation="off", temperature=0.0, endpoint="completions"
    )
    plan, retrieval, answer = mock.bodies
    for body in (plan, answer):
        assert body["speculation"] == {"mode": "off"}
        assert body["temperature"] == 0.0
        assert body["prompt"].endswith("Assistant:")
    assert set(retrieval) == {"model", "input", "encoding_format"}


async def test_a_flow_can_be_sent_again(text_file) -> None:
    """The same seed sends the same requests, and another seed sends others."""
    first, again, other = Mock(), Mock(), Mock()
    await run_questions(text_file, first, count=2)
    await run_questions(text_file, again, count=2)
    await run_questions(text_file, other, count=2, seed=9)
    assert first.bodies == again.bodies
    assert first.bodies != other.bodies


def test_the_command_reports_hops_and_deadline(text_file, tmp_path) -> None:
    """Table, summary, page and events have the hops under `--deadline-ms`."""
    out, html, events = (tmp_path / name for name in ("s.json", "p.html", "e.jsonl"))
    with serving_in_a_thread(Mock()) as url:
        flags = ["--workload", "rag", "--text-file", text_file, "--requests", 3]
        flags += ["--deadline-ms", 60_000, "--max-tokens", 8]
        result = command(url, *flags, "--json", out, "--html", html, "--events", events)
    summary = json.loads(out.read_text())
    assert result.exit_code == (0 if summary["valid"] else 3), result.output
    assert (summary["requests"], summary["attainment"]) == (3, 1.0)
    assert summary["details"]["settings"]["slo"]["latency_s"] == 60.0
    hops = summary["details"]["hops"]
    assert list(hops) == ["plan", "retrieve", "answer"]
    assert hops["answer"]["facts"]["by_vectors"] == [3, 3]
    assert sum(hop["share"]["mean"] for hop in hops.values()) < 1.0
    assert "of the deadline" in result.output
    assert "<h2>Hops</h2>" in html.read_text()
    again = tmp_path / "again.json"
    command("report", events, "--json", again)
    assert again.read_text() == out.read_text()


def test_a_server_without_embeddings_is_refused(text_file) -> None:
    """The command exits with status 2 and the reason before the run."""
    with serving_in_a_thread(Mock(embeds=0)) as url:
        result = command(url, "--workload", "rag", "--text-file", text_file, "--requests", 1)
    assert result.exit_code == 2
    assert "embeddings of passages: http_status: 404" in " ".join(result.output.split())
