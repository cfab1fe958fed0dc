"""Tests of the parser of server-sent events."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.loadgen.sending.sse import SseEvent, SseParser

lines = st.one_of(
    st.sampled_from(["data: a", "data:b", "data", "data: ", ": comment", "event: x", "id: 1", ""]),
    st.text(st.characters(codec="utf-8"), max_size=8).map(lambda t: f"data: {t}"),
)
streams = st.lists(st.tuples(lines, st.sampled_from(["\n", "\r", "\r\n"])), max_size=20).map(
    lambda parts: "".join(line + end for line, end in parts).encode()
)


def parse(*chunks: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@given(streams, st.lists(st.integers(0, 300)))
def test_chunk_boundaries_do_not_matter(stream: bytes, cuts: list[int]) -> None:
    """The parser returns the same events for any split of the stream, even inside a character."""
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    chunks = [stream[a:b] for a, b in itertools.pairwise(places)]
    assert parse(*chunks) == parse(stream)
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == parse(stream)


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [SseEvent(b"a")]),
        (b"data: a\ndata: b\n\n", [SseEvent(b"a\nb")]),
        (b"data:  a\n\ndata:b\n\n", [SseEvent(b" a"), SseEvent(b"b")]),
        (b": ping\n\ndata: a\r\n\r\n", [SseEvent(b"a")]),
        (b"event: error\ndata: {}\n\ndata: b\n\n", [SseEvent(b"{}", "error"), SseEvent(b"b")]),
        (b"\xef\xbb\xbfdata: a\n\n", [SseEvent(b"a")]),
        (b"data\n\n", [SseEvent(b"")]),
        (b"event: x\n\n", []),
        (b"data: cut off\n", []),
        (b"", []),
    ],
)
def test_cases_of_the_standard(stream: bytes, events: list[SseEvent]) -> None:
    """The parser handles several data lines, comments, types, a byte order mark and truncation."""
    assert parse(stream) == events
