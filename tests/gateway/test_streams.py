"""Tests of delta streams: the guarantees of a backend for its readers."""

from __future__ import annotations

import asyncio

import pytest

from draftgate.backends.errors import BackendFailed
from draftgate.backends.streams import DeltaStreams
from draftgate.backends.token_ids import compact
from draftgate.backends.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    Phases,
    SamplingParams,
    StepTrace,
    TokenLogprob,
)
from draftgate.policies.types import SpeculationMode, SpeculationPlan

PLAN = SpeculationPlan("off", SpeculationMode.AUTO, None, 0, "test")
DONE = FinishReason.LENGTH


def request(n: int = 1, request_id: str = "r") -> GenerationRequest:
    return GenerationRequest(request_id, compact((1,)), SamplingParams(8, 0), PLAN, n)


def delta(*tokens: int, choice: int = 0, end: FinishReason | None = None) -> Delta:
    logprobs = tuple(TokenLogprob(token, -1.0) for token in tokens)
    return Delta(choice, tokens, "".join(f"<{t}>" for t in tokens), logprobs, end)


async def test_reader_gets_only_deltas_of_its_request() -> None:
    """A reader receives only the deltas of its own request."""
    streams = DeltaStreams(lambda _: None)
    one, two = streams.open(request(request_id="1")), streams.open(request(request_id="2"))
    streams.deliver([("1", delta(1, end=DONE)), ("2", delta(2, end=DONE)), ("3", delta(3))])
    assert [d.token_ids async for d in one] == [(1,)]
    assert [d.token_ids async for d in two] == [(2,)]


async def test_waiting_deltas_of_a_choice_are_merged() -> None:
    """A slow reader receives one merged delta per choice, in order and without loss."""
    streams = DeltaStreams(lambda _: None)
    stream = streams.open(request(n=2))
    streams.deliver([("r", delta(1)), ("r", delta(7, choice=1))])
    streams.deliver([("r", delta(2, 3)), ("r", delta(8, choice=1, end=DONE))])
    streams.deliver([("r", delta(4, end=DONE))])
    assert [d async for d in stream] == [
        delta(1, 2, 3, 4, end=DONE),
        delta(7, 8, choice=1, end=DONE),
    ]


async def test_traced_steps_are_merged_too() -> None:
    """A merged delta contains every traced step and the phases of the choice."""
    streams = DeltaStreams(lambda _: None)
    stream = streams.open(request())
    phases = Phases(0.0, 1.0, ((2.0, 3),), 2.0)
    steps = [StepTrace(1), StepTrace(2, "ngram", 3, (2, 9), 1, (0.8, 0.5), 0.1)]
    streams.deliver([("r", delta(1)._replace(steps=(steps[0],), phases=phases))])
    streams.deliver([("r", delta(2, 3, end=DONE)._replace(steps=(steps[1],)))])
    (merged,) = [d async for d in stream]
    assert (merged.steps, merged.phases) == (tuple(steps), phases)


async def test_unread_tokens_are_counted() -> None:
    """The stream counts the unread tokens of all choices."""
    streams = DeltaStreams(lambda _: None)
    stream = streams.open(request(n=2))
    assert streams.unread_tokens("r") == streams.unread_tokens("unknown") == 0
    streams.deliver([("r", delta(1, 2)), ("r", delta(7, choice=1)), ("r", delta(3))])
    assert streams.unread_tokens("r") == 4
    await anext(stream)
    assert streams.unread_tokens("r") == 1
    streams.deliver([("r", delta(4, end=DONE)), ("r", delta(8, choice=1, end=DONE))])
    assert streams.unread_tokens("r") == 0
    assert [d.token_ids async for d in stream] == [(7, 8), (4,)]


async def test_closing_an_unread_stream_abandons_the_request() -> None:
    """Closing a stream before the first read abandons its request."""
    abandoned: list[str] = []
    streams = DeltaStreams(abandoned.append)
    stream = streams.open(request())
    await stream.aclose()
    await stream.aclose()
    assert abandoned == ["r"]
    assert len(streams) == 0
    assert [d async for d in stream] == []


async def test_closing_a_complete_stream_does_not_abandon_the_request() -> None:
    """Closing a stream with all finish reasons does not abandon its request."""
    abandoned: list[str] = []
    streams = DeltaStreams(abandoned.append)
    stream = streams.open(request())
    streams.deliver([("r", delta(1, end=DONE))])
    assert len(streams) == 0
    await stream.aclose()
    assert abandoned == []


async def test_cancelling_the_reader_abandons_its_stream() -> None:
    """Cancelling the reader abandons its request without an explicit close."""
    abandoned: list[str] = []
    streams = DeltaStreams(abandoned.append)
    stream = streams.open(request())
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait({reader})
    assert abandoned == ["r"]


async def test_failure_ends_every_stream_after_delivered_deltas() -> None:
    """A reader receives the delivered deltas and then the error of a failed worker."""
    abandoned: list[str] = []
    streams = DeltaStreams(abandoned.append)
    stream = streams.open(request())
    streams.deliver([("r", delta(1))])
    streams.fail("broken")
    assert await anext(stream) == delta(1)
    with pytest.raises(BackendFailed, match="broken"):
        await anext(stream)
    assert abandoned == []
    assert len(streams) == 0


async def test_second_stream_of_a_request_id_is_refused() -> None:
    """The backend refuses a second stream with the same request id."""
    streams = DeltaStreams(lambda _: None)
    first = streams.open(request())
    with pytest.raises(ValueError, match="already running"):
        streams.open(request())
    await first.aclose()
