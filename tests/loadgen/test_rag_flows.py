"""Tests of whole `rag` flows against a mock server: planned and interleaved, with all deadlines."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from draftgate.loadgen.checking.lossless import replay_of
from draftgate.loadgen.measuring.hops import summarize_hops
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.planning.pairs import DOCUMENTATION
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.sending.client import OpenAIClient, open_session
from draftgate.loadgen.sending.driver import run_plan
from draftgate.loadgen.sending.passage_index import BATCH, build_index
from draftgate.loadgen.sending.run import load_settings
from draftgate.loadgen.types import Slo
from draftgate.loadgen.workloads.base import TokenEstimator, WorkloadSettings
from draftgate.loadgen.workloads.rag import DEADLINE_S, INDEXED, indexed_pairs
from draftgate.loadgen.workloads.rag_flow import (
    EXPECTED_PLAN_TOKENS,
    MOST_ROUNDS,
    STEP_TOKENS,
    Agent,
    Deadlines,
    RagOptions,
    RequestWork,
    split_deadline,
)
from draftgate.loadgen.workloads.rag_plan import (
    INSTRUCTION,
    MOST_STEPS,
    PASSAGE_TOKENS,
    PASSAGES,
    PLAN_SCHEMA,
)
from tests.loadgen import mock_server
from tests.loadgen.mock_server import Mock, Script, serving, serving_in_a_thread
from tests.loadgen.test_cli import command

COUNTER = TokenEstimator(4.0)
SPLIT = RagOptions(deadlines=Deadlines.SPLIT)
INTERLEAVED = RagOptions(Agent.INTERLEAVED)
BATCHES = -(-INDEXED // BATCH)


def steps_of(*queries: str, uses=()) -> Script:
    """Return a script whose plan has these queries, the last one with these uses."""
    steps = [{"source": DOCUMENTATION, "query": query, "uses": []} for query in queries]
    if steps:
        steps[-1]["uses"] = list(uses)
    return Script(plan=json.dumps({"steps": steps}))


PLANNED = steps_of("alpha beta", "gamma")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """Write 300 sections of words that rarely repeat, whose headings recur in their text."""
    rng, path = Random(0), tmp_path_factory.mktemp("text") / "sections.md"
    with path.open("w") as file:
        for _ in range(300):
            words = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(200)]
            file.write(f"# {' '.join(words[:8])}\n{' '.join(words)}\n\n")
    return path


async def run_questions(
    text_file,
    mock: Mock,
    script: Script = PLANNED,
    *,
    count: int = 4,
    rag: RagOptions = RagOptions(),  # noqa: B008
    **fields,
):
    """Run some questions and return the run and their flows.

    The mock records only the requests after the index.
    """
    load = Load(
        workload="rag", concurrency=1, requests=count, text_file=text_file, rag=rag, **fields
    )
    pairs = indexed_pairs(WorkloadSettings(0, COUNTER, open_corpus(text_file)))
    async with serving(mock) as url, open_session() as session:
        client = OpenAIClient(session, url, "mock")
        index = await build_index(client, pairs, rag.document_fields())
        mock.bodies.clear()
        mock.headers.clear()
        plan = [
            replace(p, request=replace(p.request, extra=(("mock", vars(script)), *p.request.extra)))
            for p in make_plan(load, counter=COUNTER, retriever=index).requests
        ]
        run = await run_plan(OpenAIClient(session, url, "mock"), plan, concurrency=1)
    return run, [p.flow for p in plan]


def facts_of(run) -> dict[str, tuple[int, int]]:
    """Return how often each fact was true, and how often it was known."""
    return {name: v for hop in summarize_hops(run.records) for name, v in hop.facts.items()}


def hops_of(record) -> list[str]:
    return [hop.planned.request.hop for hop in record.hops]


def test_the_index_is_the_same_for_every_load(text_file) -> None:
    """The passages have the expected number and length, and do not depend on the seed."""
    pairs = indexed_pairs(WorkloadSettings(0, COUNTER, open_corpus(text_file)))
    assert len(pairs) == INDEXED
    assert {COUNTER.count(pair.passage) for pair in pairs} == {PASSAGE_TOKENS}
    assert pairs == indexed_pairs(WorkloadSettings(9, COUNTER, open_corpus(text_file)))


async def test_a_question_is_planned_retrieved_and_answered(text_file) -> None:
    """The flow sends a plan, embeddings and a final request over five passages."""
    mock = Mock()
    run, flows = await run_questions(text_file, mock)
    assert [r.verdict for r in run.records] == ["ok"] * 4
    plan, retrieval, answer = mock.bodies[:3]
    assert plan["response_format"]["json_schema"]["schema"] == PLAN_SCHEMA
    assert plan["max_tokens"] == MOST_STEPS * STEP_TOKENS
    assert retrieval["input"] == [flows[0].question, "alpha beta", "gamma"]
    content = answer["messages"][0]["content"]
    assert content.startswith(INSTRUCTION)
    assert f"[{PASSAGES}] " in content
    assert content.endswith(f'Question: what is said about "{flows[0].question}"?')
    assert "response_format" not in answer
    assert {tuple(hops_of(record)) for record in run.records} == {("plan", "retrieve", "answer")}
    facts = facts_of(run)
    popular = sum(flow.about < PASSAGES for flow in flows)
    assert facts.pop("five_most_popular_find") == (popular, 4)
    assert facts == dict.fromkeys(
        (
            *("plan_parsed", "passage_found_at_1", "passage_found_at_5"),
            *("words_find_at_1", "words_find_at_5", "by_vectors"),
        ),
        (4, 4),
    )
    for flow, body in zip(flows, mock.bodies[2::3], strict=True):
        passage = flow.retriever.pairs[flow.about].passage
        assert passage in body["messages"][0]["content"]


async def test_a_step_that_uses_another_is_retrieved_after_it(text_file) -> None:
    """The second retrieval sends the query with the start of the passage that step 1 found."""
    mock = Mock()
    run, flows = await run_questions(text_file, mock, steps_of("alpha", "beta", uses=[1]), count=1)
    assert hops_of(run.records[0]) == ["plan", "retrieve", "retrieve", "answer"]
    _, first, second, _ = mock.bodies
    assert first["input"] == [flows[0].question, "alpha"]
    (text,) = second["input"]
    assert text.startswith("beta ")
    shown = text.removeprefix("beta ")
    assert any(pair.passage.startswith(shown) for pair in flows[0].retriever.pairs)
    assert len(shown) == 60


async def test_missed_passages_are_reported(text_file, monkeypatch) -> None:
    """The report counts how often equal vectors found the right passage by chance."""
    monkeypatch.setattr(mock_server, "vector_of", lambda _: [1.0])
    run, flows = await run_questions(text_file, Mock(), Script(), count=12)
    right = sum(flow.about < PASSAGES for flow in flows)
    facts = facts_of(run)
    assert facts["passage_found_at_5"] == facts["five_most_popular_find"] == (right, 12)
    assert facts["passage_found_at_1"] == (sum(flow.about == 0 for flow in flows), 12)
    assert facts["words_find_at_5"] == (12, 12)
    assert 0 < right < 12


async def test_an_interleaved_agent_asks_again_with_the_passages_so_far(text_file) -> None:
    """Each of three rounds asks for one step and retrieves it, and the answer follows."""
    mock = Mock()
    run, flows = await run_questions(
        text_file, mock, steps_of("alpha"), count=2, rag=INTERLEAVED, max_tokens=9
    )
    assert [r.verdict for r in run.records] == ["ok"] * 2
    assert hops_of(run.records[0]) == ["next", "retrieve"] * MOST_ROUNDS + ["answer"]
    first, retrieval, second, again, third, _, answer = mock.bodies[:7]
    assert retrieval["input"] == [flows[0].question, "alpha"]
    assert again["input"] == ["alpha"]
    right = flows[0].retriever.pairs[flows[0].about].passage
    shown = [right in body["messages"][0]["content"] for body in (first, second, third, answer)]
    assert shown == [False, True, True, True]
    limits = [
        body["response_format"]["json_schema"]["schema"]["properties"]["steps"]["maxItems"]
        for body in (first, second, third)
    ]
    assert limits == [1, 1, 1]
    assert (first["max_tokens"], answer["max_tokens"]) == (STEP_TOKENS, 9)
    assert facts_of(run)["plan_parsed"] == (2, 2)


async def test_an_interleaved_agent_may_stop_early(text_file) -> None:
    """A reply without a step, or without a valid step, ends the search after the first round."""
    for script, parsed in ((steps_of(), 2), (Script(), 0)):
        run, _ = await run_questions(text_file, Mock(), script, count=2, rag=INTERLEAVED)
        assert {tuple(hops_of(r)) for r in run.records} == {("next", "retrieve", "next", "answer")}
        facts = facts_of(run)
        assert facts["plan_parsed"] == (parsed, 2)
        assert facts["passage_found_at_5"] == (2, 2)


async def test_both_agents_get_the_same_questions(text_file) -> None:
    """Agent and deadlines change neither the questions nor the limits of answers."""
    flows = []
    for rag in (RagOptions(), INTERLEAVED, SPLIT):
        mock = Mock()
        run, planned = await run_questions(text_file, mock, rag=rag)
        limits = [r.planned.request.max_tokens for r in run.records]
        flows.append(
            [(flow.about, flow.question, n) for flow, n in zip(planned, limits, strict=True)]
        )
    assert flows[0] == flows[1] == flows[2]


@pytest.mark.parametrize("agent", Agent)
async def test_requests_announce_flow_and_deadline(text_file, agent: Agent) -> None:
    """All requests of a flow send one id and the user's deadline, and no targets."""
    mock = Mock()
    run, _ = await run_questions(
        text_file, mock, count=2, rag=RagOptions(agent), slo=Slo(ttft_s=1.0, latency_s=2.5)
    )
    ids = [headers.get("x-flow-id") for headers in mock.headers]
    hops = len(run.records[0].hops)
    assert len(set(ids[:hops])) == len(set(ids[hops:])) == 1
    assert len(set(ids)) == 2
    assert {headers["x-flow-deadline-ms"] for headers in mock.headers} == {"2500"}
    assert not any("x-slo-ttft-ms" in headers for headers in mock.headers)
    for record in run.records:
        assert record.planned.request.slo == Slo(ttft_s=1.0, latency_s=2.5)
        assert {hop.planned.request.flow_id for hop in record.hops} <= set(ids)
        again = replay_of(record).request
        assert (again.flow_id, again.flow_deadline_s) == ("", None)


@pytest.mark.parametrize("deadlines", Deadlines)
async def test_a_refused_flow_ends_at_its_first_request(text_file, deadlines: Deadlines) -> None:
    """A refusal of an announced flow ends it, and other flows still try to answer."""
    mock, rag = Mock(), RagOptions(deadlines=deadlines)
    run, _ = await run_questions(text_file, mock, Script(fault="status"), count=2, rag=rag)
    assert all(record.hops[0].refused for record in run.records)
    ended = deadlines is Deadlines.FLOW
    expected = ["plan"] if ended else ["plan", "retrieve", "answer"]
    assert [hops_of(record) for record in run.records] == [expected] * 2
    assert [record.verdict for record in run.records] == ["http_status"] * 2


async def test_flows_have_new_ids_in_every_run(text_file) -> None:
    """A server that remembers a flow does not mistake the next run's questions for it."""
    first, second = Mock(), Mock()
    await run_questions(text_file, first, count=1)
    await run_questions(text_file, second, count=1)
    assert first.headers[0]["x-flow-id"] != second.headers[0]["x-flow-id"]


async def test_without_deadlines_requests_announce_nothing(text_file) -> None:
    """The option `none` sends no header, and records still show whether a flow was in time."""
    mock = Mock()
    rag = RagOptions(deadlines=Deadlines.NONE)
    run, _ = await run_questions(text_file, mock, count=2, rag=rag)
    names = {name for headers in mock.headers for name in headers}
    assert not {name for name in names if name.startswith(("x-flow", "x-slo"))}
    assert all(r.planned.request.slo == Slo(latency_s=DEADLINE_S) for r in run.records)
    assert all(hop.announced_met is None for hop in summarize_hops(run.records))


async def test_split_announces_a_share_of_the_deadline(text_file) -> None:
    """The headers match the split of the remaining time, by default of ten seconds."""
    mock = Mock()
    run, flows = await run_questions(text_file, mock, count=2, rag=SPLIT)
    for record in run.records:
        assert record.planned.request.slo == Slo(latency_s=DEADLINE_S)
        plan, retrieval, answer = (hop.planned.request for hop in record.hops)
        elapsed_s = record.hops[2].scheduled_s - record.scheduled_s
        work = RequestWork(COUNTER.count(answer.messages[0].content), answer.max_tokens)
        least = split_deadline(Slo(latency_s=DEADLINE_S), elapsed_s, work)
        assert answer.slo.tpot_s == pytest.approx(least.tpot_s, rel=0.02)
        assert 0 < plan.slo.ttft_s < DEADLINE_S / 3 > retrieval.slo.ttft_s > 0
        assert retrieval.slo.tpot_s is None
    assert "x-flow-id" not in {name for headers in mock.headers for name in headers}
    assert "x-slo-tpot-ms" not in mock.headers[1]
    first = run.records[0].hops
    sent_ms = float(mock.headers[2]["x-slo-tpot-ms"])
    assert sent_ms == pytest.approx(first[2].planned.request.slo.tpot_s * 1e3, rel=1e-4)
    # The expected answer has five passages of 256 tokens, and the plan its expected length.
    plan = first[0].planned.request
    works = [
        RequestWork(COUNTER.count(plan.messages[0].content), EXPECTED_PLAN_TOKENS),
        RequestWork(COUNTER.count(flows[0].question) + 15),
        RequestWork(PASSAGES * PASSAGE_TOKENS + 60, run.records[0].planned.request.max_tokens),
    ]
    expected = split_deadline(Slo(latency_s=DEADLINE_S), 0.0, works[0], works[1:])
    assert plan.slo.ttft_s == pytest.approx(expected.ttft_s, rel=0.02)


async def test_split_expects_all_rounds_of_an_agent(text_file) -> None:
    """The first request of an interleaved flow announces less time than that of a planned flow."""
    firsts = []
    for agent in Agent:
        rag = RagOptions(agent, Deadlines.SPLIT)
        run, _ = await run_questions(text_file, Mock(), count=1, rag=rag)
        firsts.append(run.records[0].hops[0].planned.request.slo.ttft_s)
    assert firsts[1] < firsts[0]


@pytest.mark.parametrize("script", [Script(), Script(plan='{"steps": [{"cut'), Script(tokens=1)])
async def test_without_a_plan_the_question_is_searched(text_file, script) -> None:
    """A response without a plan fails no request, and the report counts the missing plan."""
    mock = Mock()
    run, _ = await run_questions(text_file, mock, script)
    assert [r.verdict for r in run.records] == ["ok"] * 4
    assert [len(body["input"]) for body in mock.bodies[1::3]] == [1] * 4
    facts = facts_of(run)
    assert facts["plan_parsed"] == (0, 4)
    assert facts["passage_found_at_1"][0] == 4


async def test_without_vectors_passages_are_found_by_words(text_file) -> None:
    """The flow fails if embeddings fail, but the user gets a response over matching passages."""
    run, _ = await run_questions(text_file, Mock(embeds=BATCHES + 1), count=3)
    assert [r.verdict for r in run.records] == ["ok", "http_status", "http_status"]
    assert run.records[1].detail.startswith("retrieve: 404")
    answers = [dict(r.hops[2].planned.request.facts) for r in run.records]
    assert [value["by_vectors"] for value in answers] == [True, False, False]
    assert all(value["passage_found_at_1"] for value in answers[1:])
    assert [r.hops[2].verdict for r in run.records] == ["ok"] * 3


async def test_embedding_models_are_named_in_their_requests(text_file) -> None:
    """Queries name their model and type, and other requests the model of the load."""
    mock = Mock()
    rag = RagOptions(embedding_model="documents", query_embedding_model="queries")
    await run_questions(text_file, mock, count=1, rag=rag)
    plan, retrieval, answer = mock.bodies
    assert (retrieval["model"], retrieval["input_type"]) == ("queries", "query")
    assert [body["model"] for body in (plan, answer)] == ["mock"] * 2
    assert rag.document_fields() == (("model", "documents"), ("input_type", "document"))
    one = RagOptions(embedding_model="both")
    assert one.query_fields() == (("model", "both"), ("input_type", "query"))
    with pytest.raises(ValueError, match="requires --embedding-model"):
        RagOptions(query_embedding_model="queries")


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


async def test_a_salt_precedes_every_prompt(text_file) -> None:
    """Two runs with different salts share no prefix of a prompt, but all searches."""
    mock = Mock()
    run, flows = await run_questions(text_file, mock, count=1, rag=RagOptions(salt="Run 7. "))
    plan, retrieval, answer = mock.bodies
    assert all(b["messages"][0]["content"].startswith("Run 7. ") for b in (plan, answer))
    assert retrieval["input"][0] == flows[0].question
    assert run.records[0].verdict == "ok"


async def test_a_flow_can_be_sent_again(text_file) -> None:
    """The same seed sends the same requests, and another seed sends others."""
    first, again, other = Mock(), Mock(), Mock()
    await run_questions(text_file, first, count=2)
    await run_questions(text_file, again, count=2)
    await run_questions(text_file, other, count=2, seed=9)
    assert first.bodies == again.bodies
    assert first.bodies != other.bodies


async def test_prompts_fit_a_small_context(text_file) -> None:
    """Passages of each prompt are cut to the context that instruction and answer leave."""
    mock = Mock()
    load = Load(workload="rag", requests=3, text_file=text_file, rag=INTERLEAVED)
    pairs = indexed_pairs(WorkloadSettings(0, COUNTER, open_corpus(text_file)))
    async with serving(mock) as url, open_session() as session:
        client = OpenAIClient(session, url, "mock")
        index = await build_index(client, pairs)
        plan = make_plan(load, counter=COUNTER, max_model_len=512, retriever=index)
        mock.bodies.clear()
        await run_plan(client, plan.requests, concurrency=1)
    chats = [body for body in mock.bodies if "messages" in body]
    assert len(chats) >= 9
    for body in chats:
        assert COUNTER.count(body["messages"][0]["content"]) + body["max_tokens"] <= 512


def test_flags_of_retrieval_require_the_workload() -> None:
    """Other workloads retrieve nothing, so the flags would have no effect."""
    with pytest.raises(ValueError, match="flags of retrieval require --workload rag"):
        Load(workload="chat", rag=INTERLEAVED)


@pytest.mark.parametrize(("workload", "recorded"), [("rag", True), ("chat", False)])
def test_settings_of_a_run_have_its_options(workload: str, recorded: bool) -> None:
    """The settings of `rag` contain its options even by default, and those of others do not."""
    settings = load_settings(Load(workload=workload))
    assert ("rag" in settings) == recorded
    assert settings.get("rag", {}).get("deadlines", "flow") == "flow"


def test_the_command_reports_hops_and_deadline(text_file, tmp_path) -> None:
    """Table, summary, page and events have the hops under `--deadline-ms`."""
    out, html, events = (tmp_path / name for name in ("s.json", "p.html", "e.jsonl"))
    mock = Mock()
    with serving_in_a_thread(mock) as url:
        flags = ["--workload", "rag", "--text-file", text_file, "--requests", 3]
        flags += ["--deadline-ms", 60_000, "--max-tokens", 8, "--rag-agent", "interleaved"]
        flags += ["--rag-deadlines", "split", "--embedding-model", "documents"]
        result = command(url, *flags, "--json", out, "--html", html, "--events", events)
    summary = json.loads(out.read_text())
    assert result.exit_code == (0 if summary["valid"] else 3), result.output
    assert (summary["requests"], summary["attainment"]) == (3, 1.0)
    assert summary["details"]["settings"]["slo"]["latency_s"] == 60.0
    assert summary["details"]["settings"]["rag"]["agent"] == "interleaved"
    assert {body["model"] for body in mock.bodies} == {"documents", "mock"}
    hops = summary["details"]["hops"]
    assert list(hops) == ["next", "retrieve", "answer"]
    assert hops["answer"]["facts"]["by_vectors"] == [3, 3]
    assert "of the deadline" in result.output
    assert "in time" in result.output
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
