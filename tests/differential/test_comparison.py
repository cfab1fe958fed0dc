"""Tests of the comparison between two versions, and of the observations that it compares."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.differential.__main__ import ROOT, observe
from tests.differential.cases import Generator
from tests.differential.comparison import compared
from tests.differential.exchange import Answer, Case, Observed, Part, Responses
from tests.differential.record import Outcome, Record

SCENARIO = "worker"
CASES = [Case("a chat", SCENARIO, [])]
EVENTS = (b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n")
LINE = {"level": "INFO", "event": "request", "id": "0123456789abcdef"}


def answer(body: bytes = b"", **headers: str) -> Answer:
    return Answer(200, list(headers.items()), [Part(0.0, body)], complete=True)


def record(request_id: str = "0123456789abcdef", total: float = 1.0) -> Record:
    """Return observations of a stream and of the pages after it."""
    chat = answer(**{"Content-Type": "text/event-stream", "x-request-id": request_id})
    chat.parts = [Part(0.1 * number, event) for number, event in enumerate(EVENTS)]
    sent = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n{}"
    line = {**LINE, "id": request_id}
    metrics = f'# TYPE a counter\na{{b="c d"}} {total}\n'
    pages = {"/metrics": metrics, "/decisions?limit=9": json.dumps([{"worker_id": request_id}])}
    read = {page: Observed([answer(text.encode())]) for page, text in pages.items()}
    return Record([Outcome([Observed([chat])], [sent], [line])], {1: read})


def kinds(after: Record) -> list[str]:
    """Return the kinds of differences to `record()`."""
    found = compared(CASES, {SCENARIO: record()}, {SCENARIO: after})
    return [difference.kind for difference in found]


def test_different_ids_are_no_difference() -> None:
    """Ids that occur in the same places are equal."""
    assert kinds(record(request_id="fedcba9876543210")) == []


def test_id_of_another_request_is_a_difference() -> None:
    """An id that differs from the id in another place is a difference."""
    after = record()
    after.outcomes[0].lines[0]["id"] = "fedcba9876543210"
    assert kinds(after) == ["log line request"]


CHANGES: dict[str, Any] = {
    "status": lambda chat, _: setattr(chat, "status", 201),
    "header x-more": lambda chat, _: chat.headers.append(("X-More", "1")),
    "lost event": lambda chat, _: chat.parts.pop(),
    "further event": lambda chat, _: chat.parts.append(Part(0.2, b": ping\n\n")),
    "event": lambda chat, _: setattr(chat.parts[1], "data", b'data: {"n": 3}\n\n'),
    "form of the event": lambda chat, _: setattr(chat.parts[1], "data", b'data: {"n":2}\n\n'),
    "time of an event": lambda chat, _: setattr(chat.parts[1], "at_s", 0.2),
    "incomplete response": lambda chat, _: setattr(chat, "complete", False),
    "request to the upstream": lambda _, outcome: outcome.upstream.clear(),
    "header host to the upstream": lambda _, outcome: outcome.upstream.__setitem__(
        0, outcome.upstream[0].replace(b"Host: a", b"Host: b")
    ),
    "log line request": lambda _, outcome: outcome.lines.append(dict(LINE)),
    "closed": lambda _, outcome: setattr(outcome.exchanges[0], "closed", True),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_change_is_detected(kind: str) -> None:
    """A single change is reported as one difference of its kind."""
    after = deepcopy(record())
    outcome = after.outcomes[0]
    CHANGES[kind](outcome.exchanges[0].answers[0], outcome)
    assert kinds(after) == [kind]


def test_changed_counter_is_detected() -> None:
    """A counter with another value is reported by its name."""
    assert kinds(record(total=2.0)) == ["metric a"]


def test_changed_decision_is_detected() -> None:
    """A changed decision is reported by the place of the value."""
    after = record()
    after.pages[1]["/decisions?limit=9"].answers[0].parts[0].data = b'[{"worker_id": "w-9"}]'
    assert kinds(after) == ["/decisions[].worker_id"]


def test_responses_are_read_in_any_pieces() -> None:
    """The parser of pipelined responses does not depend on the division into pieces."""
    stream = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    stream += b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + stream
    data += b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    for size in (1, 7, len(data)):
        responses = Responses(["POST", "POST"], begun_s=0.0)
        for begin in range(0, len(data), size):
            responses.feed(data[begin : begin + size], 1.0)
        first, second = responses.observed.answers
        assert [part.data for part in first.parts] == list(EVENTS)
        assert (second.status, responses.observed.statuses) == (400, [100])
        assert not responses.missing
        assert not responses.keeps_open


def test_same_version_has_no_differences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two runs of the same version observe the same, and most requests reach a handler."""
    monkeypatch.setattr("tests.differential.__main__.WORK", tmp_path)
    cases = Generator(3).cases(80)
    before, after = observe([ROOT, ROOT], cases)
    assert compared(cases, before, after) == []
    outcomes = [outcome for found in before.values() for outcome in found.outcomes]
    answers = [a for outcome in outcomes for e in outcome.exchanges for a in e.answers]
    assert sum(a.status == 200 for a in answers) >= 30
