"""Workloads: reproducible requests with the documented lengths and prefixes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from random import Random
from statistics import median

import pytest
from scipy.stats import chisquare

from draftgate.loadgen.planning import corpus
from draftgate.loadgen.planning.corpus import TextPosition, open_corpus
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.types import ChatMessage, RequestSpec, Slo
from draftgate.loadgen.workloads import WORKLOADS, make_workload
from draftgate.loadgen.workloads.base import (
    Lengths,
    TokenEstimator,
    WorkloadSettings,
    cut,
    prompt_text,
    through,
    zipf,
)
from draftgate.loadgen.workloads.chat import MEAN_TURNS, OPEN_SESSIONS
from draftgate.loadgen.workloads.long_document import LongDocument
from draftgate.loadgen.workloads.mixed import CLASSES, INTERACTIVE, TENANTS
from draftgate.loadgen.workloads.rag import INSTRUCTION, PASSAGES
from draftgate.loadgen.workloads.replay import Replay
from draftgate.loadgen.workloads.request_file import MAX_TOKENS
from draftgate.loadgen.workloads.shared_prefix import POPULARITY, PREFIX_TOKENS, PREFIXES

ROOT = Path(__file__).resolve().parents[2]
COUNTER = TokenEstimator(4.0)
SLO = Slo(ttft_s=0.25, tpot_s=0.06)
LEAST_P = 1e-3
"""Seeds are fixed, so tests of distributions are deterministic."""

by_name = pytest.mark.parametrize("name", WORKLOADS)


class WordCounter:
    """An exact counter that counts words."""

    def count(self, text: str) -> int:
        return len(text.split())


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"{n} mine\n" for n in range(9999)))
    return path


def asked(name: str, count: int, **more):
    workload = make_workload(name, settings_of(7, **more))
    return [workload.request(index) for index in range(count)]


def settings_of(seed: int, text_file: Path | None = None, **more) -> WorkloadSettings:
    """Return settings with an estimator of four characters per token."""
    more = {"counter": COUNTER} | more
    return WorkloadSettings(seed, corpus=open_corpus(text_file), **more)


def row_of(prompt_tokens: int, prefix_ids: tuple[int, ...] = (), **more) -> TraceRow:
    """Return a recorded request whose blocks have 64 tokens."""
    fields = {"output_tokens": 9, "block_tokens": 64} | more
    return TraceRow(0.0, prompt_tokens, prefix_ids=prefix_ids, **fields)


def common_length(first: Sequence, second: Sequence) -> int:
    """Return how many leading items are equal."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# --- all workloads --------------------------------------------------------------------------------


@by_name
def test_a_request_depends_only_on_seed_and_index(name: str) -> None:
    """Requests built in reverse order are the same, and another seed changes all."""
    forwards = asked(name, 100)
    again = make_workload(name, settings_of(7))
    assert [again.request(index) for index in reversed(range(100))] == forwards[::-1]
    other = make_workload(name, settings_of(8))
    assert all(prompt_text(other.request(i)) != prompt_text(forwards[i]) for i in range(100))


@by_name
def test_requests_are_well_formed(name: str) -> None:
    """Each has a prompt or messages that end with the user's, a limit, and its own seed."""
    questions = asked(name, 100)
    for question in questions:
        assert (question.prompt is None) != (not question.messages)
        assert question.prompt is not None or question.messages[-1].role == "user"
        assert question.max_tokens >= 1
        assert prompt_text(question).strip()
    assert [question.seed for question in questions] == list(range(7, 107))


@by_name
@pytest.mark.parametrize("max_model_len", [256, 2048, 8192])
def test_prompt_and_answer_fit_the_server(name: str, max_model_len: int) -> None:
    """Prompt and answer together fit the server's context."""
    for question in asked(name, 100, max_model_len=max_model_len):
        assert COUNTER.count(prompt_text(question)) + question.max_tokens <= max_model_len


@by_name
def test_max_tokens_sets_every_answer(name: str) -> None:
    """A given limit applies to every answer; otherwise limits vary in most workloads."""
    assert {question.max_tokens for question in asked(name, 50, max_tokens=33)} == {33}
    drawn = {question.max_tokens for question in asked(name, 50)}
    assert len(drawn) > 10 or name == "shared_prefix"


@by_name
def test_the_text_file_is_the_only_source(name: str, text_file, monkeypatch) -> None:
    """With a text file every prompt is written from it, and nothing else is opened."""
    monkeypatch.setattr(corpus, "_installed", lambda: pytest.fail("opened the installed texts"))
    workload = make_workload(name, settings_of(0, text_file))
    assert all(" mine\n" in prompt_text(workload.request(index)) for index in range(20))


@by_name
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_workload_can_be_sent_to_either_endpoint(name: str, endpoint: str) -> None:
    """Requests for an endpoint have its form and hold all of the text."""
    for question in asked(name, 40):
        sent = through(question, endpoint)
        assert (sent.prompt is None) == (endpoint == "chat")
        assert (sent.messages == ()) == (endpoint == "completions")
        said = [question.prompt] if question.messages == () else question.messages
        texts = [part.content if isinstance(part, ChatMessage) else part for part in said]
        assert all(text in prompt_text(sent) for text in texts)


def test_impossible_workloads_are_refused(tmp_path) -> None:
    """Unknown names, empty files and missing files raise an error that says so."""
    with pytest.raises(ValueError, match=r"no workload 'poetry'.*shared_prefix"):
        make_workload("poetry", settings_of(0))
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        make_workload("code", settings_of(0, tmp_path / "empty"))
    with pytest.raises(FileNotFoundError):
        make_workload("code", settings_of(0, tmp_path / "missing"))


def test_workloads_need_neither_network_nor_torch_nor_tokenizer() -> None:
    """All workloads build requests without sockets and without importing such libraries."""
    script = (
        "import sys, socket\n"
        "def refuse(*a, **k): raise OSError('no network')\n"
        "socket.socket = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from draftgate.loadgen.workloads import WORKLOADS, make_workload\n"
        "from draftgate.loadgen.workloads.base import WorkloadSettings\n"
        "[make_workload(name, WorkloadSettings(0)).request(0) for name in WORKLOADS]\n"
        "print(sorted({'torch', 'tokenizers', 'transformers', 'huggingface_hub'} & {*sys.modules}))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


# --- each workload --------------------------------------------------------------------------------


def test_code_is_python_that_stops_where_a_block_opens() -> None:
    """Prompts are pieces of the standard library, and most end with an opened block."""
    library = open_corpus().code
    questions = asked("code", 200)
    assert sum(q.prompt.endswith(":\n") for q in questions) > 150
    assert all(q.prompt.count("\n") >= 1 for q in questions if len(q.prompt) > 400)
    first = questions[0].prompt.split("\n")[0]
    documents = enumerate(library._documents)
    texts = (library.read(TextPosition(i, 0), document.size) for i, document in documents)
    assert any(first in text for text in texts)


def test_code_is_as_long_as_the_trace_it_is_modelled_on() -> None:
    """Medians of prompt and answer are Azure's 1,469 and 13 tokens."""
    questions = asked("code", 1000)
    assert median(COUNTER.count(q.prompt) for q in questions) == pytest.approx(1469, rel=0.15)
    assert median(q.max_tokens for q in questions) == pytest.approx(13, abs=1)


def test_turns_of_a_conversation_follow_each_other_and_grow() -> None:
    """Each turn holds the previous one, an answer and a new message, 32 requests later."""
    sessions: dict[str, list[tuple[int, RequestSpec]]] = {}
    for index, question in enumerate(asked("chat", 20 * OPEN_SESSIONS)):
        sessions.setdefault(question.session, []).append((index, question))
    for turns in sessions.values():
        for (before, earlier), (after, later) in pairwise(turns):
            assert after - before == OPEN_SESSIONS
            assert later.messages[: len(earlier.messages)] == earlier.messages
            new = later.messages[len(earlier.messages) :]
            assert [message.role for message in new] == ["assistant", "user"]
            prompts = [through(turn, "completions").prompt for turn in (earlier, later)]
            assert prompts[1].startswith(prompts[0])
        assert [m.role for m in turns[0][1].messages] == ["system", "user"]
    lengths = Counter(len(turns) for turns in sessions.values())
    assert len(lengths) > 4
    mean = sum(k * n for k, n in lengths.items()) / lengths.total()
    assert mean == pytest.approx(MEAN_TURNS, rel=0.15)


def test_a_conversation_ends_before_it_overflows() -> None:
    """In a small context conversations are shorter and never cut."""
    small = asked("chat", 500, max_model_len=512)
    most_turns = max((len(q.messages) for q in small), default=0)
    assert most_turns < max(len(q.messages) for q in asked("chat", 500))
    assert all(q.messages[0].content == small[0].messages[0].content for q in small)


@pytest.mark.parametrize("max_model_len", [None, 1024])
def test_the_quotation_is_in_the_document(max_model_len: int | None) -> None:
    """The right answer follows in the document exactly after the words that end the prompt."""
    workload = make_workload("long_document", settings_of(3, max_model_len=max_model_len))
    assert isinstance(workload, LongDocument)
    for index in range(60):
        question, answer = workload.request(index), workload.answer(index)
        document, begun = question.prompt.split("\n\nQuote from the text above")
        begun = begun.split(":\n\n", 1)[1]
        assert begun + answer in document
        assert answer.strip()
        assert COUNTER.count(answer) <= question.max_tokens + 1


def test_requests_of_a_session_share_its_prefix_and_nothing_more() -> None:
    """A session has one system message, and two sessions differ from the first characters."""
    by_session: dict[str, list[RequestSpec]] = {}
    for index, question in enumerate(asked("shared_prefix", 300)):
        assert question.messages[1].content.startswith(f"{index}. ")
        by_session.setdefault(question.session, []).append(question)
    for session, questions in by_session.items():
        system = questions[0].messages[0].content
        assert COUNTER.count(system) == pytest.approx(PREFIX_TOKENS, rel=0.02)
        assert {q.messages[0].content for q in questions} == {system}
        assert system.startswith(session.removeprefix("prefix-") + ".")
    assert len({q[0].messages[0].content for q in by_session.values()}) == len(by_session)


def test_prefixes_have_zipf_popularity() -> None:
    """Over 64 prefixes the share of a rank is in proportion to 1 / rank (chi-square)."""
    seen = Counter(q.session for q in asked("shared_prefix", 2000))
    weights = [(rank + 1) ** -POPULARITY for rank in range(PREFIXES)]
    expected = [2000 * weight / sum(weights) for weight in weights]
    observed = [seen[f"prefix-{rank}"] for rank in range(PREFIXES)]
    assert chisquare(observed, expected).pvalue > LEAST_P


def test_retrieved_passages_are_distinct_and_the_popular_ones_return() -> None:
    """Each prompt has five passages and asks about one; popular passages recur."""
    seen: Counter[str] = Counter()
    for question in asked("rag", 200):
        content = question.messages[0].content
        assert content.startswith(INSTRUCTION)
        body, _, subject = content.removeprefix(INSTRUCTION).rpartition("\n\nQuestion: ")
        starts = [body.index(f"[{n}] ") for n in range(1, PASSAGES + 1)]
        passages = [body[i + 4 : j] for i, j in zip(starts, [*starts[1:], None], strict=True)]
        assert len({*passages}) == PASSAGES
        assert subject.split('"', 1)[1].rsplit('"', 1)[0] in " ".join(body.split())
        seen.update(passage.strip() for passage in passages)
    assert seen.total() == 200 * PASSAGES
    assert seen.most_common(1)[0][1] > 10


def test_classes_and_tenants_have_their_shares() -> None:
    """Classes are drawn per request, and tenants per session or single request (chi-square)."""
    questions = asked("mixed", 3000)
    classes = Counter(q.class_name for q in questions)
    tenants = Counter({q.session or q.seed: q.tenant for q in questions}.values())
    for seen, shares in ((classes, CLASSES), (tenants, TENANTS)):
        observed = [seen[name] for name in shares]
        expected = [seen.total() * share for share in shares.values()]
        assert chisquare(observed, expected).pvalue > LEAST_P


def test_classes_have_different_slos() -> None:
    """Interactive has the given SLO, standard MLPerf's multiple, and batch none."""
    questions = asked("mixed", 400, slo=SLO)
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
    assert {q.slo for q in asked("mixed", 50) if q.class_name == "interactive"} == {INTERACTIVE}


def test_a_mix_skips_no_turn_of_a_conversation() -> None:
    """The standard class of mixed sends what chat alone sends, in its order."""
    mixed = [q for q in asked("mixed", 400) if q.class_name == "standard"]
    alone = asked("chat", len(mixed))
    assert [q.messages for q in mixed] == [q.messages for q in alone]


# --- replay ---------------------------------------------------------------------------------------


def test_a_replay_has_the_lengths_of_the_trace() -> None:
    """Prompts and answers are as long as the rows, with and without blocks."""
    rows = [
        row_of(10),
        row_of(500, output_tokens=77, class_name="batch", tenant="acme"),
        row_of(64 * 3, (1, 2, 3)),
        row_of(64 * 2 + 5, (1, 2, 9)),
        row_of(64 * 2 + 100, (1, 2)),
        row_of(40, (1, 2)),
    ]
    replayed = Replay(rows, settings_of(0))
    for index, one in enumerate(rows):
        question = replayed.request(index)
        assert COUNTER.count(question.prompt) == one.prompt_tokens
        assert question.max_tokens == one.output_tokens
    assert (replayed.request(1).class_name, replayed.request(1).tenant) == ("batch", "acme")
    with pytest.raises(IndexError):
        replayed.request(len(rows))


def test_replayed_prompts_share_exactly_the_blocks_of_equal_ids() -> None:
    """Two prompts agree through their equal leading ids and by less than 4 tokens further."""
    ids = [(0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 5, 3), (6, 1, 2, 3), (0, 1), (), ()]
    rows = [row_of(256, one) for one in ids]
    replayed = Replay(rows, settings_of(0))
    prompts = [replayed.request(index).prompt for index in range(len(rows))]
    for i, first in enumerate(ids):
        for j, second in enumerate(ids[:i]):
            shared = common_length(first, second) * 64 * 4
            common = common_length(prompts[i], prompts[j])
            assert shared <= common < shared + 16


def test_a_replay_is_reproducible() -> None:
    """A second replay in reverse order has the same prompts."""
    rows = [row_of(100 + k, (k % 3, k)) for k in range(20)]
    first, again = (Replay(rows, settings_of(0)) for _ in range(2))
    forwards = [first.request(index) for index in range(20)]
    assert [again.request(index) for index in reversed(range(20))] == forwards[::-1]
    assert Replay(rows, settings_of(1)).request(0) != forwards[0]


def test_rows_without_blocks_share_nothing(tmp_path) -> None:
    """Even from a text of one line, prompts differ within their first words."""
    (tmp_path / "line").write_text("the same again ")
    rows = [row_of(200)] * 10
    replayed = Replay(rows, settings_of(0, tmp_path / "line"))
    prompts = [replayed.request(index).prompt for index in range(10)]
    assert max(common_length(a, b) for a, b in pairwise(prompts)) < 16


def test_a_replay_fits_the_server_and_keeps_what_is_shared() -> None:
    """Prompts that are too long lose their ends and keep the shared beginning."""
    rows = [row_of(5000, (*range(70), k), output_tokens=4000) for k in (100, 200)]
    replayed = Replay(rows, settings_of(0, max_model_len=1024))
    questions = [replayed.request(index) for index in range(2)]
    assert all(COUNTER.count(q.prompt) + q.max_tokens <= 1024 for q in questions)
    assert questions[0].prompt == questions[1].prompt


# --- files of requests ---------------------------------------------------------------------------


def test_a_file_of_requests_starts_again_after_its_last(tmp_path) -> None:
    """Requests repeat from the first line, each with its own seed and the run's SLO."""
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 5, "stop": ["x"]}\n')
    workload = make_workload(str(path), settings_of(7, slo=SLO))
    requests = [workload.request(index) for index in range(3)]
    assert [one.prompt for one in requests] == ["a", "b", "a"]
    assert [one.max_tokens for one in requests] == [MAX_TOKENS, 5, MAX_TOKENS]
    assert [one.seed for one in requests] == [7, 8, 9]
    assert requests[1].extra == (("stop", ["x"]),)
    assert {one.slo for one in requests} == {SLO}
    limited = make_workload(str(path), settings_of(7, max_tokens=2))
    assert {limited.request(index).max_tokens for index in range(2)} == {2}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: "),
        ("{}", "line 2: expected either `prompt` or `messages`"),
        ('{"prompt": "a", "messages": []}', "line 2: expected either"),
        ('{"messages": [{"role": "user", "content": 1}]}', "line 2: .*content"),
        ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "line 2: .*name"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens must be positive"),
        ('{"prompt": "a", "stream": false}', "line 2: the load generator sets stream itself"),
    ],
)
def test_a_malformed_request_names_its_line(tmp_path, line: str, message: str) -> None:
    """File, line and fault are named before anything is sent."""
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=message) as refused:
        make_workload(str(path), settings_of(0))
    assert str(path) in str(refused.value)


def test_a_file_without_requests_is_refused(tmp_path) -> None:
    """An empty file is not a workload."""
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no requests"):
        make_workload(str(tmp_path / "empty.jsonl"), settings_of(0))


# --- lengths and counting -------------------------------------------------------------------------


def test_lengths_are_lognormal_and_clamped() -> None:
    """Half of the lengths are below the median, and none is outside the limits."""
    lengths, rng = Lengths(median=100, sigma=1.0, least=20, most=400), Random(1)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert min(drawn) == 20
    assert max(drawn) == 400
    assert sum(length <= 100 for length in drawn) / 4000 == pytest.approx(0.5, abs=0.03)
    within = sum(100 / 2.718 < length < 100 * 2.718 for length in drawn) / 4000
    assert within == pytest.approx(0.683, abs=0.03)


def test_zipf_ranks_follow_the_exponent() -> None:
    """Ranks are drawn in proportion to rank^-s (chi-square)."""
    shares, rng = zipf(8, 0.8), Random(2)
    seen = Counter(shares.draw(rng) for _ in range(4000))
    weights = [rank**-0.8 for rank in range(1, 9)]
    expected = [4000 * weight / sum(weights) for weight in weights]
    assert chisquare([seen[rank] for rank in range(8)], expected).pvalue > LEAST_P


def test_a_measured_estimator_is_right_for_the_sum_of_its_samples() -> None:
    """The ratio is all characters over all tokens, and the source states the number of texts."""
    counter = TokenEstimator.measured([("a" * 300, 100), ("b" * 100, 60)])
    assert counter.characters_per_token == pytest.approx(2.5)
    assert counter.count("c" * 400) == 160
    assert counter.source == "measured on 2 texts"
    assert TokenEstimator().source == "estimated, not measured"
    for nothing in ([], [("", 3)], [("abc", 0)]):
        with pytest.raises(ValueError, match="cannot be measured"):
            TokenEstimator.measured(nothing)
    with pytest.raises(ValueError, match="positive"):
        TokenEstimator(0.0)


@pytest.mark.parametrize("counter", [COUNTER, WordCounter()], ids=["ratio", "words"])
def test_a_cut_is_the_longest_prefix_that_fits(counter) -> None:
    """A cut has at most the given tokens, and one more character would exceed them."""
    text = "one two  three four\nfive six seven " * 3
    for tokens in range(40):
        kept = cut(text, tokens, counter)
        assert text.startswith(kept)
        assert counter.count(kept) <= tokens
        assert kept == text or counter.count(text[: len(kept) + 1]) > tokens


def test_an_exact_counter_is_obeyed() -> None:
    """With an exact counter passages have exactly the requested lengths."""
    rows = [row_of(700), row_of(64 * 4, (1, 2, 3, 4))]
    replayed = Replay(rows, settings_of(0, counter=WordCounter()))
    assert WordCounter().count(replayed.request(0).prompt) == 700
    assert WordCounter().count(replayed.request(1).prompt) == pytest.approx(256, abs=4)
