"""Every workload gives reproducible, well-formed requests that fit the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftgate.loadgen.planning import corpus
from draftgate.loadgen.types import ChatMessage
from draftgate.loadgen.workloads import WORKLOADS, make_workload
from draftgate.loadgen.workloads.base import prompt_text, to_endpoint
from tests.loadgen.workload_requests import COUNTER, make_requests, settings_of

ROOT = Path(__file__).resolve().parents[2]

by_name = pytest.mark.parametrize("name", WORKLOADS)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"{n} mine\n" for n in range(9999)))
    return path


@by_name
def test_a_request_depends_only_on_seed_and_index(name: str) -> None:
    """A workload builds the same requests in reverse order, and others from another seed."""
    forwards = make_requests(name, 100)
    again = make_workload(name, settings_of(7))
    assert [again.request(index) for index in reversed(range(100))] == forwards[::-1]
    other = make_workload(name, settings_of(8))
    assert all(prompt_text(other.request(i)) != prompt_text(forwards[i]) for i in range(100))


@by_name
def test_requests_are_well_formed(name: str) -> None:
    """Each request has a prompt or messages that end with the user's, a limit, and its own seed."""
    questions = make_requests(name, 100)
    for question in questions:
        assert (question.prompt is None) != (not question.messages)
        assert question.prompt is not None or question.messages[-1].role == "user"
        assert question.max_tokens >= 1
        assert prompt_text(question).strip()
    assert [question.seed for question in questions] == list(range(7, 107))


@by_name
@pytest.mark.parametrize("max_model_len", [256, 2048, 8192])
def test_prompt_and_answer_fit_the_server(name: str, max_model_len: int) -> None:
    """Prompt and response together fit the server's context."""
    for question in make_requests(name, 100, max_model_len=max_model_len):
        assert COUNTER.count(prompt_text(question)) + question.max_tokens <= max_model_len


@by_name
def test_max_tokens_sets_every_answer(name: str) -> None:
    """A given limit applies to every response, and otherwise limits vary in most workloads."""
    assert {question.max_tokens for question in make_requests(name, 50, max_tokens=33)} == {33}
    drawn = {question.max_tokens for question in make_requests(name, 50)}
    assert len(drawn) > 10 or name == "shared_prefix"


@by_name
def test_the_text_file_is_the_only_source(name: str, text_file, monkeypatch) -> None:
    """A workload writes every prompt from the text file and opens no other text."""
    monkeypatch.setattr(corpus, "_installed", lambda: pytest.fail("opened the installed texts"))
    workload = make_workload(name, settings_of(0, text_file))
    assert all(" mine\n" in prompt_text(workload.request(index)) for index in range(20))


@by_name
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_workload_can_be_sent_to_either_endpoint(name: str, endpoint: str) -> None:
    """A request for an endpoint has its form and holds all of the text."""
    for question in make_requests(name, 40):
        sent = to_endpoint(question, endpoint)
        assert (sent.prompt is None) == (endpoint == "chat")
        assert (sent.messages == ()) == (endpoint == "completions")
        parts = [question.prompt] if question.messages == () else question.messages
        texts = [part.content if isinstance(part, ChatMessage) else part for part in parts]
        assert all(text in prompt_text(sent) for text in texts)


def test_impossible_workloads_are_refused(tmp_path) -> None:
    """Unknown names, empty files and missing files raise an error that names the reason."""
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
