"""Tests of the delivery of deltas: the guarantees of a backend for the sinks of its requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from draftgate.backends.errors import BackendFailed
from draftgate.backends.streams import MOST_AT_ONCE, DeltaSinks, UnreadDeltas
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


@dataclass
class Kept:
    """A sink that keeps everything, and may raise an error."""

    deltas: list[Delta] = field(default_factory=list)
    error: Exception | None = None
    raises: Exception | None = None

    def put(self, delta: Delta) -> None:
        if self.raises is not None:
            raise self.raises
        self.deltas.append(delta)

    def fail(self, error: Exception) -> None:
        assert self.error is None
        self.error = error

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]


class Opened(DeltaSinks):
    """Sinks that record the ends of requests."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, bool]] = []
        super().__init__(lambda request_id, cancelled: self.ends.append((request_id, cancelled)))


def test_sink_gets_only_deltas_of_its_request() -> None:
    """A sink gets the deltas of its own request, in the call that delivers them."""
    sinks, one, two = Opened(), Kept(), Kept()
    sinks.open(request(request_id="1"), one)
    sinks.open(request(request_id="2"), two)
    sinks.deliver([("1", delta(1, end=DONE)), ("2", delta(2, end=DONE)), ("3", delta(3))])
    assert (one.tokens, two.tokens) == ([1], [2])


def test_request_ends_with_its_last_choice() -> None:
    """A request stays open until each of its choices has a finish reason."""
    sinks, sink = Opened(), Kept()
    sinks.open(request(n=2), sink)
    sinks.deliver([("r", delta(1, end=DONE))])
    assert "r" in sinks
    sinks.deliver([("r", delta(2, choice=1, end=DONE)), ("r", delta(3, choice=1))])
    assert len(sinks) == 0
    assert sinks.ends == [("r", False)]
    assert sink.tokens == [1, 2]


def test_cancelled_request_gets_nothing_more() -> None:
    """A cancel ends a request once, and a later one has no effect."""
    sinks, sink = Opened(), Kept()
    sinks.open(request(), sink)
    sinks.cancel("r")
    sinks.cancel("r")
    sinks.deliver([("r", delta(1))])
    assert sinks.ends == [("r", True)]
    assert not sink.deltas


def test_cancel_after_the_last_delta_has_no_effect() -> None:
    """A request with all finish reasons is not cancelled."""
    sinks = Opened()
    sinks.open(request(), Kept())
    sinks.deliver([("r", delta(1, end=DONE))])
    sinks.cancel("r")
    assert sinks.ends == [("r", False)]


def test_failure_follows_the_delivered_deltas() -> None:
    """Every open request gets the error of a failed worker after its deltas."""
    sinks, sink = Opened(), Kept()
    sinks.open(request(), sink)
    sinks.deliver([("r", delta(1))])
    sinks.fail("broken")
    assert sink.tokens == [1]
    assert isinstance(sink.error, BackendFailed)
    assert str(sink.error) == "broken"
    assert (sinks.ends, len(sinks)) == ([], 0)


def test_error_of_a_sink_ends_its_request() -> None:
    """A sink that raises gets its error, and the worker drops the request."""
    sinks, sink, other = Opened(), Kept(raises=OverflowError("test")), Kept()
    sinks.open(request(), sink)
    sinks.open(request(request_id="other"), other)
    sinks.deliver([("r", delta(1)), ("other", delta(2)), ("r", delta(3, end=DONE))])
    assert isinstance(sink.error, OverflowError)
    assert sinks.ends == [("r", True)]
    assert other.tokens == [2]


async def test_large_batches_yield_to_the_event_loop() -> None:
    """The rest of a large batch arrives in further callbacks, before the next batch."""
    sinks, sink = Opened(), Kept()
    sinks.open(request(), sink)
    numbers = list(range(2 * MOST_AT_ONCE + 1))
    sinks.deliver(("r", delta(number)) for number in numbers)
    assert len(sink.deltas) == MOST_AT_ONCE
    sinks.deliver([("r", delta(-1))])
    await asyncio.sleep(0)
    assert len(sink.deltas) == 2 * MOST_AT_ONCE
    await asyncio.sleep(0)
    assert sink.tokens == [*numbers, -1]


async def test_failure_follows_the_rest_of_a_large_batch() -> None:
    """An error does not overtake the deltas before it."""
    sinks, sink = Opened(), Kept()
    sinks.open(request(), sink)
    sinks.deliver(("r", delta(number)) for number in range(2 * MOST_AT_ONCE))
    sinks.fail("broken")
    assert sink.tokens == list(range(2 * MOST_AT_ONCE))
    assert sink.error is not None
    await asyncio.sleep(0)


def test_second_request_of_an_id_is_refused() -> None:
    """The backend refuses a second request with the same id."""
    sinks = Opened()
    sinks.open(request(), Kept())
    with pytest.raises(ValueError, match="already running"):
        sinks.open(request(), Kept())


def test_unread_deltas_of_a_choice_are_merged() -> None:
    """A slow reader receives one merged delta per choice, in order and without loss."""
    unread = UnreadDeltas()
    unread.put(delta(1))
    unread.put(delta(7, choice=1))
    unread.put(delta(2, 3))
    unread.put(delta(8, choice=1, end=DONE))
    unread.put(delta(4, end=DONE))
    assert unread.pop() == delta(1, 2, 3, 4, end=DONE)
    assert unread.pop() == delta(7, 8, choice=1, end=DONE)
    assert not unread


def test_traced_steps_are_merged_too() -> None:
    """A merged delta contains every traced step and the phases of the choice."""
    phases = Phases(0.0, 1.0, ((2.0, 3),), 2.0)
    steps = [StepTrace(1), StepTrace(2, "ngram", 3, (2, 9), 1, (0.8, 0.5), 0.1)]
    unread = UnreadDeltas()
    unread.put(delta(1)._replace(steps=(steps[0],), phases=phases))
    unread.put(delta(2, 3, end=DONE)._replace(steps=(steps[1],)))
    merged = unread.pop()
    assert (merged.steps, merged.phases) == (tuple(steps), phases)


def test_unread_tokens_are_counted() -> None:
    """The unread tokens of all choices count."""
    unread = UnreadDeltas()
    assert unread.tokens == 0
    for one in (delta(1, 2), delta(7, choice=1), delta(3)):
        unread.put(one)
    assert unread.tokens == 4
    unread.pop()
    assert unread.tokens == 1
