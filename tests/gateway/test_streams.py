"""Delta streams: what a backend promises its readers."""

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


async def test_a_reader_gets_the_deltas_of_its_own_request_only() -> None:
    """Deltas go to the request they are addressed to; those of strangers are dropped."""
    streams = DeltaStreams(lambda _: None)
    one, two = streams.open(request(request_id="1")), streams.open(request(request_id="2"))
    streams.deliver([("1", delta(1, end=DONE)), ("2", delta(2, end=DONE)), ("3", delta(3))])
    assert [d.token_ids async for d in one] == [(1,)]
    assert [d.token_ids async for d in two] == [(2,)]


async def test_waiting_deltas_of_a_choice_merge_into_one() -> None:
    """A reader that is behind gets one delta per choice: nothing lost, order kept."""
    streams = DeltaStreams(lambda _: None)
    stream = streams.open(request(n=2))
    streams.deliver([("r", delta(1)), ("r", delta(7, choice=1))])
    streams.deliver([("r", delta(2, 3)), ("r", delta(8, choice=1, end=DONE))])
    streams.deliver([("r", delta(4, end=DONE))])
    assert [d async for d in stream] == [
        delta(1, 2, 3, 4, end=DONE),
        delta(7, 8, choice=1, end=DONE),
    ]


async def test_what_steps_did_merges_too() -> None:
    """A reader that is behind misses no step, nor how its choice began."""
    streams = DeltaStreams(lambda _: None)
    stream = streams.open(request())
    phases = Phases(0.0, 1.0, ((2.0, 3),), 2.0)
    steps = [StepTrace(1), StepTrace(2, "ngram", 3, (2, 9), 1, (0.8, 0.5), 0.1)]
    streams.deliver([("r", delta(1)._replace(steps=(steps[0],), phases=phases))])
    streams.deliver([("r", delta(2, 3, end=DONE)._replace(steps=(steps[1],)))])
    (merged,) = [d async for d in stream]
    assert (merged.steps, merged.phases) == (tuple(steps), phases)


async def test_tokens_that_wait_for_a_reader_are_counted() -> None:
    """Over all choices, until they are read; none where the worker owes nothing or never did."""
    streams = DeltaStreams(lambda _: None)
    stream = streams.open(request(n=2))
    assert streams.unread_tokens("r") == streams.unread_tokens("nobody") == 0
    streams.deliver([("r", delta(1, 2)), ("r", delta(7, choice=1)), ("r", delta(3))])
    assert streams.unread_tokens("r") == 4
    await anext(stream)
    assert streams.unread_tokens("r") == 1
    streams.deliver([("r", delta(4, end=DONE)), ("r", delta(8, choice=1, end=DONE))])
    assert streams.unread_tokens("r") == 0
    assert [d.token_ids async for d in stream] == [(7, 8), (4,)]


async def test_a_stream_that_was_never_read_is_abandoned_when_closed() -> None:
    """Closing before the first read still tells the worker, which native generators would not."""
    abandoned: list[str] = []
    streams = DeltaStreams(abandoned.append)
    stream = streams.open(request())
    await stream.aclose()
    await stream.aclose()
    assert abandoned == ["r"]
    assert len(streams) == 0
    assert [d async for d in stream] == []


async def test_a_complete_stream_is_not_abandoned() -> None:
    """Once the worker has delivered every finish reason, closing tells it nothing."""
    abandoned: list[str] = []
    streams = DeltaStreams(abandoned.append)
    stream = streams.open(request())
    streams.deliver([("r", delta(1, end=DONE))])
    assert len(streams) == 0
    await stream.aclose()
    assert abandoned == []


async def test_a_cancelled_reader_abandons_its_stream() -> None:
    """Cancelling the task that reads frees the request without an explicit close."""
    abandoned: list[str] = []
    streams = DeltaStreams(abandoned.append)
    stream = streams.open(request())
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait({reader})
    assert abandoned == ["r"]


async def test_a_failure_ends_every_stream_after_what_was_delivered() -> None:
    """What the worker delivered before it broke is still read; then comes the error."""
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


async def test_a_request_id_cannot_run_twice_at_once() -> None:
    """A second open stream of the same id would steal deltas, so it is refused."""
    streams = DeltaStreams(lambda _: None)
    first = streams.open(request())
    with pytest.raises(ValueError, match="already running"):
        streams.open(request())
    await first.aclose()
