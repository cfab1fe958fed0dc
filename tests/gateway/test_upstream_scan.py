"""Tests of the scanner of an upstream's events."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftgate.backends.base import TokenUsage
from draftgate.backends.openai.events import (
    EventScan,
    StreamEnding,
    drafts_in,
    usage_in,
    whole_usage,
)
from draftgate.backends.types import SpeculationOutcome
from tests.examples import examples
from tests.gateway.upstreams import (
    BEGUN_RESPONSE,
    DELTA_OF_RESPONSE,
    DONE,
    ENDED_RESPONSE,
    LAST,
    TOKEN,
    USAGE,
)

MESSAGE_START = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":5}}}\n\n'
MESSAGE_END = (
    b'event: message_delta\ndata: {"usage":{"output_tokens":3}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
WORDS = (
    "[DONE]",
    "error",
    "usage",
    "finish_reason",
    '"error"',
    "\n\n",
    "data: [DONE]",
    "ü",
    "",
    "a",
)


@dataclass(frozen=True)
class ScanResult:
    passed: bytes
    ending: StreamEnding | None
    outputs: int
    finished: int
    usage: TokenUsage | None


def scan_blocks(*blocks: bytes) -> ScanResult:
    scan = EventScan()
    passed = b"".join(scan.feed(block) for block in blocks)
    scan.close()
    return ScanResult(passed, scan.ending, scan.outputs, scan.finished, scan.usage())


@st.composite
def chunk(draw: st.DrawFn) -> bytes:
    """Draw a data event as engines write it."""
    reason = draw(st.sampled_from([None, None, "stop", "length"]))
    choice = {"index": 0, "text": draw(st.sampled_from(WORDS)), "finish_reason": reason}
    body: dict[str, object] = {"id": "c", "choices": [choice]}
    if draw(st.booleans()):
        body["usage"] = draw(st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 4}]))
    if draw(st.integers(0, 9)) == 0:
        body["error"] = draw(st.sampled_from([None, {"message": "x"}, "broken"]))
    spaced = draw(st.booleans())
    text = json.dumps(body, separators=None if spaced else (",", ":"), ensure_ascii=False)
    return b"data:" + b" " * draw(st.integers(0, 1)) + text.encode() + b"\n\n"


unusual_events = st.sampled_from(
    [DONE, USAGE, BEGUN_RESPONSE, DELTA_OF_RESPONSE, ENDED_RESPONSE, MESSAGE_START, MESSAGE_END,
     ENDED_RESPONSE.replace(b"completed", b"failed"), b": comment\n\n",
     b"\n", b"\n\n\n", b"event: x\nid: 1\ndata: {}\n\n", b"data\n\n",
     b"data: [1,2]\ndata: 3\n\n", b"data:\xff\xfe\n\n", b"half", b'data: {"error"\n\n', b"\r",
     b"x\r\r"]
)  # fmt: skip
line_ends = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])


@st.composite
def split_streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """Draw a stream of events and the same bytes in random pieces."""
    parts = draw(st.lists(st.one_of(chunk(), unusual_events), max_size=6))
    end = draw(line_ends)
    stream = b"".join(part.replace(b"\n", end) for part in parts)
    cuts = sorted(draw(st.sets(st.integers(0, len(stream)), max_size=12)))
    edges = [0, *cuts, len(stream)]
    return stream, [stream[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=examples(400))
@given(split_streams())
@example((b"data: x\r\n\r\ndata: y", [b"data: x\r\n\r", b"\ndata: y"]))
@example((b"data: x\n\n\r\n", [b"data: x\n\n\r", b"\n"]))
@example((LAST + DONE + TOKEN, [LAST, DONE, TOKEN]))
@example((b"\n" + DONE, [b"\n", DONE]))
@example((TOKEN + b"\n" + DONE, [TOKEN, b"\n" + DONE]))
def test_result_does_not_depend_on_the_pieces(split: tuple[bytes, list[bytes]]) -> None:
    """A scan of a stream gives the same result for any division of the stream into blocks."""
    stream, blocks = split
    expected = scan_blocks(stream)
    assert scan_blocks(*blocks) == expected
    assert scan_blocks(*(stream[i : i + 1] for i in range(len(stream)))) == expected
    assert stream.startswith(expected.passed)


@given(st.lists(chunk(), max_size=6), line_ends)
def test_result_equals_a_full_parse(chunks: list[bytes], end: bytes) -> None:
    """The scanner finds the same ending, finish reasons and usage as a full parse."""
    stream = (
        b"".join([*chunks, DONE]).replace(b"\n", end) + b"x"
    )  # shows whether a last CR is half of a CRLF
    finished = outputs = 0
    usage, ending = None, StreamEnding.UNFINISHED
    for data in chunks:
        event = json.loads(data.removeprefix(b"data:"))
        if event.get("error") is not None:
            ending = StreamEnding.ERROR
            break
        outputs += 1
        finished += event["choices"][0]["finish_reason"] is not None
        if event.get("usage") is not None:
            usage = TokenUsage(3, 0, 4)
    if finished and ending is not StreamEnding.ERROR:
        ending = StreamEnding.DONE
    result = scan_blocks(stream)
    assert (result.ending, result.finished, result.usage) == (ending, finished, usage)
    assert result.outputs == outputs


COUNTS = b'"num_spec_steps": 3, "num_draft_tokens": 9, "num_accepted_draft_tokens": 4'
READABLE = b'{%s, "acceptance_histogram": [1, 0, 2]}' % COUNTS
UNREADABLE = (
    b'{%s, "acceptance_histogram": {"0": 1}}' % COUNTS,
    b'{%s, "acceptance_histogram": [-1]}' % COUNTS,
    b"{%s}" % COUNTS,
    b'{%s, "cut": ' % COUNTS,
    b"null",
)


@pytest.mark.parametrize("report", [READABLE, *UNREADABLE])
def test_reported_drafts_have_counts_and_steps(report: bytes) -> None:
    """The scanner reads the report with its steps, and ignores one that it cannot read."""
    event = b'data: {"choices":[],"metrics":{"speculative_decoding": %s}}\n\n' % report
    scan = EventScan()
    for block in (TOKEN, LAST, event, DONE):
        scan.feed(block)
    expected = SpeculationOutcome(3, 9, 4, (1, 0, 2)) if report is READABLE else None
    assert scan.drafts() == expected


def test_text_about_drafts_is_no_report() -> None:
    """A text of the model that looks like a report does not count, because it is escaped."""
    text = json.dumps(f'"speculative_decoding": {{{COUNTS.decode()}}}').encode()
    assert drafts_in(b'{"choices": [{"text": %s}]}' % text) is None


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        (b'..."usage":{"prompt_tokens":3,"completion_tokens":4}}', TokenUsage(3, 0, 4)),
        (b'{"usage": {"input_tokens": 3, "output_tokens": 4}}', TokenUsage(3, 0, 4)),
        (
            b'{"usage": {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 2}}}',
            TokenUsage(3, 2, 0),
        ),
        (
            b'{"usage": {"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 2}}',
            TokenUsage(5, 2, 4),
        ),
        (b'{"usage": {"output_tokens": 4}}', TokenUsage(0, 0, 4)),
        (b'{"usage": {"total_tokens": 9}, "results": []}', TokenUsage(9, 0, 0)),
        (b'{"usage": null}', None),
        (b'{"usage": {"prompt_tokens": 3', None),
        (b'{"text": "\\"usage\\": {}", "usage": {}}', TokenUsage(0, 0, 0)),
        (b'{"usage": {"prompt_tokens": "7", "completion_tokens": -1}}', TokenUsage(0, 0, 0)),
        (
            b'{"usage": {"prompt_tokens_details": null, "completion_tokens": 2}}',
            TokenUsage(0, 0, 2),
        ),
    ],
)
def test_last_usage_object_counts(text: bytes, usage: TokenUsage | None) -> None:
    """The scanner uses the last usage object and treats invalid counts as 0."""
    assert usage_in(text) == usage


_NUMBERS = st.integers(-3, 9) | st.sampled_from([None, 1.5, True, "7", 10**30])
_FIELDS = (
    *("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens"),
    *("cache_read_input_tokens", "cache_creation_input_tokens"),
)
_DETAILS = st.none() | st.dictionaries(st.just("cached_tokens"), _NUMBERS)


@given(st.dictionaries(st.sampled_from(_FIELDS), _NUMBERS), _DETAILS)
@example({"prompt_tokens": 9, "completion_tokens": 2}, {"cached_tokens": 4})
def test_usage_of_a_whole_response_is_the_same(
    usage: dict[str, object], details: dict[str, object] | None
) -> None:
    """A decoded response has the usage that a search finds, or the search has to find it."""
    # A null counts as missing, but a search takes it for a field of another API.
    usage = {name: value for name, value in usage.items() if value is not None}
    fields = {"id": "1", "usage": {**usage, "prompt_tokens_details": details}, "n": 1}
    body = json.dumps(fields).encode()
    found = whole_usage(body)
    assert found is None or found == usage_in(body)
    assert whole_usage(b'{"usage": null}') is None
    assert whole_usage(b"not JSON") is None


def test_only_deltas_of_a_response_are_outputs() -> None:
    """In a stream of `/v1/responses`, deltas count as outputs, and the last event as the end."""
    found = scan_blocks(BEGUN_RESPONSE, DELTA_OF_RESPONSE, DELTA_OF_RESPONSE * 2, ENDED_RESPONSE)
    assert (found.outputs, found.finished, found.ending) == (3, 1, StreamEnding.DONE)
    assert found.usage == TokenUsage(7, 2, 3)
    assert scan_blocks(BEGUN_RESPONSE).outputs == 0
    assert scan_blocks(BEGUN_RESPONSE, DELTA_OF_RESPONSE).ending is None
