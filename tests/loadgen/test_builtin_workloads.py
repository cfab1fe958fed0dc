"""Each built-in workload has its documented lengths, prefixes and classes."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from statistics import median

import pytest
import scipy

from draftgate.loadgen.planning.corpus import TextPosition, open_corpus
from draftgate.loadgen.types import RequestSpec, Slo
from draftgate.loadgen.workloads import make_workload
from draftgate.loadgen.workloads.base import to_endpoint
from draftgate.loadgen.workloads.chat import MEAN_TURNS, OPEN_SESSIONS
from draftgate.loadgen.workloads.long_document import LongDocument
from draftgate.loadgen.workloads.mixed import CLASSES, INTERACTIVE, TENANTS
from draftgate.loadgen.workloads.rag_plan import INSTRUCTION, PASSAGES
from draftgate.loadgen.workloads.shared_prefix import POPULARITY, PREFIX_TOKENS, PREFIXES
from tests.loadgen.workload_requests import COUNTER, LEAST_P, SLO, make_requests, settings_of


def test_code_is_python_that_stops_where_a_block_opens() -> None:
    """Prompts are pieces of the standard library, and most end with an opened block."""
    library = open_corpus().code
    questions = make_requests("code", 200)
    assert sum(q.prompt.endswith(":\n") for q in questions) > 150
    assert all(q.prompt.count("\n") >= 1 for q in questions if len(q.prompt) > 400)
    first = questions[0].prompt.split("\n")[0]
    documents = enumerate(library._documents)
    texts = (library.read(TextPosition(i, 0), document.size) for i, document in documents)
    assert any(first in text for text in texts)


def test_code_is_as_long_as_the_trace_it_is_modelled_on() -> None:
    """The medians of prompt and response are Azure's 1,469 and 13 tokens."""
    questions = make_requests("code", 1000)
    assert median(COUNTER.count(q.prompt) for q in questions) == pytest.approx(1469, rel=0.15)
    assert median(q.max_tokens for q in questions) == pytest.approx(13, abs=1)


def test_turns_of_a_conversation_follow_each_other_and_grow() -> None:
    """Each turn adds a response and a new message to the turn 32 requests earlier."""
    sessions: dict[str, list[tuple[int, RequestSpec]]] = {}
    for index, question in enumerate(make_requests("chat", 20 * OPEN_SESSIONS)):
        sessions.setdefault(question.session, []).append((index, question))
    for turns in sessions.values():
        for (before, earlier), (after, later) in pairwise(turns):
            assert after - before == OPEN_SESSIONS
            assert later.messages[: len(earlier.messages)] == earlier.messages
            new = later.messages[len(earlier.messages) :]
            assert [message.role for message in new] == ["assistant", "user"]
            prompts = [to_endpoint(turn, "completions").prompt for turn in (earlier, later)]
            assert prompts[1].startswith(prompts[0])
        assert [m.role for m in turns[0][1].messages] == ["system", "user"]
    lengths = Counter(len(turns) for turns in sessions.values())
    assert len(lengths) > 4
    mean = sum(k * n for k, n in lengths.items()) / lengths.total()
    assert mean == pytest.approx(MEAN_TURNS, rel=0.15)


def test_a_conversation_ends_before_it_overflows() -> None:
    """Conversations in a small context are shorter and never cut."""
    small = make_requests("chat", 500, max_model_len=512)
    most_turns = max((len(q.messages) for q in small), default=0)
    assert most_turns < max(len(q.messages) for q in make_requests("chat", 500))
    assert all(q.messages[0].content == small[0].messages[0].content for q in small)


@pytest.mark.parametrize("max_model_len", [None, 1024])
def test_the_quotation_is_in_the_document(max_model_len: int | None) -> None:
    """The right response follows in the document directly after the words that end the prompt."""
    workload = make_workload("long_document", settings_of(3, max_model_len=max_model_len))
    assert isinstance(workload, LongDocument)
    for index in range(60):
        question, answer = workload.request(index), workload.answer(index)
        document, begun = question.prompt.split("\n\nQuote from the text above")
        begun = begun.split(":\n\n", 1)[1]
        assert begun + answer in document
        assert answer.strip()
        assert COUNTER.count(answer) <= question.max_tokens + 1


def test_requests_of_a_session_share_only_its_prefix() -> None:
    """All requests of a session have its system message, and other sessions start differently."""
    by_session: dict[str, list[RequestSpec]] = {}
    for index, question in enumerate(make_requests("shared_prefix", 300)):
        assert question.messages[1].content.startswith(f"{index}. ")
        by_session.setdefault(question.session, []).append(question)
    for session, questions in by_session.items():
        system = questions[0].messages[0].content
        assert COUNTER.count(system) == pytest.approx(PREFIX_TOKENS, rel=0.02)
        assert {q.messages[0].content for q in questions} == {system}
        assert system.startswith(session.removeprefix("prefix-") + ".")
    assert len({q[0].messages[0].content for q in by_session.values()}) == len(by_session)


def test_prefixes_have_zipf_popularity() -> None:
    """The shares of 64 prefixes are in proportion to 1 / rank (chi-square)."""
    seen = Counter(q.session for q in make_requests("shared_prefix", 2000))
    weights = [(rank + 1) ** -POPULARITY for rank in range(PREFIXES)]
    expected = [2000 * weight / sum(weights) for weight in weights]
    observed = [seen[f"prefix-{rank}"] for rank in range(PREFIXES)]
    assert scipy.stats.chisquare(observed, expected).pvalue > LEAST_P


def test_retrieved_passages_are_distinct_and_popular_passages_recur() -> None:
    """Each prompt has five distinct passages and a question about one of them.

    Popular passages recur in several prompts.
    """
    seen: Counter[str] = Counter()
    right = {pair.question: pair.passage for pair in open_corpus().pairs}
    for question in make_requests("rag", 200):
        content = question.messages[0].content
        assert content.startswith(INSTRUCTION)
        body, _, subject = content.removeprefix(INSTRUCTION).rpartition("\n\nQuestion: ")
        _, *passages = re.split(r"(?:^|\n\n)\[[1-5]\] ", body)
        assert len({*passages}) == len(passages) == PASSAGES
        passage = right[subject.split('"', 1)[1].rsplit('"', 1)[0]]
        assert any(passage.startswith(shown.rstrip()) for shown in passages)
        seen.update(passage.strip() for passage in passages)
    assert seen.total() == 200 * PASSAGES
    assert seen.most_common(1)[0][1] > 10


def test_classes_and_tenants_have_their_shares() -> None:
    """The workload draws a class per request, and a tenant per session (chi-square)."""
    questions = make_requests("mixed", 3000)
    classes = Counter(q.class_name for q in questions)
    tenants = Counter({q.session or q.seed: q.tenant for q in questions}.values())
    for seen, shares in ((classes, CLASSES), (tenants, TENANTS)):
        observed = [seen[name] for name in shares]
        expected = [seen.total() * share for share in shares.values()]
        assert scipy.stats.chisquare(observed, expected).pvalue > LEAST_P


def test_classes_have_different_slos() -> None:
    """The interactive class has the given SLO, standard MLPerf's multiple, and batch no SLO."""
    questions = make_requests("mixed", 400, slo=SLO)
    slos = {q.class_name: q.slo for q in questions}
    assert slos["interactive"] == SLO
    assert slos["standard"] == Slo(ttft_s=pytest.approx(1.0), tpot_s=pytest.approx(0.2))
    assert slos["batch"] == Slo()
    tenants: dict[str, set[str]] = {}
    for question in questions:
        if question.session:
            tenants.setdefault(question.session, set()).add(question.tenant)
    assert tenants
    assert all(len(of_session) == 1 for of_session in tenants.values())
    by_default = make_requests("mixed", 50)
    assert {q.slo for q in by_default if q.class_name == "interactive"} == {INTERACTIVE}


def test_a_mix_skips_no_turn_of_a_conversation() -> None:
    """The standard class of `mixed` sends the requests of `chat` in the same order."""
    mixed = [q for q in make_requests("mixed", 400) if q.class_name == "standard"]
    alone = make_requests("chat", len(mixed))
    assert [q.messages for q in mixed] == [q.messages for q in alone]
