"""Back-pressure: only the requests of slow readers yield."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from draftgate.policies.pacing import (
    LONG_RTT_S,
    LONG_SHARE,
    LONGEST_HOLD_S,
    LONGEST_TPOT_S,
    PAUSED_BYTES,
    PAUSED_S,
    STALLED_TCP_RTTS,
    STALLED_TCP_S,
    UNTOUCHED_TCP_BYTES,
    Pacing,
    PathState,
    ReaderView,
    next_pacing,
    pace,
)
from draftgate.policies.types import Pace
from tests.policies.emulated_path import EmulatedPath, EmulatedStream

readers = st.builds(
    ReaderView,
    st.integers(0, 10**6),
    st.floats(0, 60),
    st.integers(0, 2000),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    rtt_s=st.none() | st.floats(1e-4, 1.0),
)
pacings = st.builds(
    Pacing,
    st.sampled_from(Pace),
    path_bytes_s=st.none() | st.floats(1.0, 1e6),
    suspected=st.booleans(),
)


def simulate_reader(
    read_s: float, made_s: float, seconds: int = 120
) -> tuple[list[Pace], list[float]]:
    """Simulate a reader and a generator that follows the paces, both in bytes per second."""
    paces, backlogs, unread, current = [], [], 0.0, Pace.FULL
    speed = {Pace.FULL: 1.0, Pace.SPARING: 0.5, Pace.PAUSED: 0.0}
    read_ema, made_ema, stall_s = made_s, made_s, 0.0
    for _ in range(seconds * 10):
        made = made_s * speed[current] / 10
        unread += made
        read = min(read_s / 10, unread)
        unread -= read
        read_ema += 0.1 * (read * 10 - read_ema)
        made_ema += 0.1 * (made * 10 - made_ema)
        stall_s = stall_s + 0.1 if unread and not read else 0.0
        current = pace(ReaderView(int(unread), stall_s, 0, read_ema, made_ema), current)
        paces.append(current)
        backlogs.append(unread)
    return paces, backlogs


@given(readers, st.sampled_from(Pace))
def test_pace_changes_one_step_at_a_time(reader, previous) -> None:
    """A request becomes sparing before it is paused."""
    assert abs(pace(reader, previous) - previous) <= 1


@given(readers)
def test_reader_that_keeps_up_is_never_slowed(reader) -> None:
    """A reader keeps full pace if its unread data is small or is read as fast as generated."""
    keeps_up = (
        reader.unread_bytes <= UNTOUCHED_TCP_BYTES
        or (reader.drain_s <= reader.sparing_s and reader.stall_s == 0)
        or reader.read_bytes_s >= max(reader.made_bytes_s, 1.0)
    )
    if keeps_up and reader.unread_bytes <= PAUSED_BYTES:
        assert pace(reader, Pace.FULL) is Pace.FULL


@given(readers, st.sampled_from(Pace), st.integers(0, 10**5))
def test_larger_backlog_never_speeds_up(reader, previous, more) -> None:
    """A larger backlog never results in a faster pace."""
    worse = replace(reader, unsent_bytes=reader.unsent_bytes + more)
    assert pace(worse, previous) >= pace(reader, previous)


def test_reader_that_stops_is_paused_within_bounded_memory() -> None:
    """The request of a stopped reader becomes sparing, then stays paused."""
    paces, backlogs = simulate_reader(0.0, 20_000.0)
    assert paces[-1] is Pace.PAUSED
    assert Pace.SPARING in paces[: paces.index(Pace.PAUSED)]
    assert backlogs[-1] < PAUSED_BYTES


def test_slow_reader_gets_everything_with_few_changes_of_pace() -> None:
    """A reader at a fifth of the rate always has data within bounded memory."""
    paces, backlogs = simulate_reader(10_000.0, 50_000.0)
    changes = sum(one is not other for one, other in pairwise(paces))
    assert max(backlogs) < PAUSED_BYTES
    assert min(backlogs[100:]) > 0
    assert Pace.PAUSED in paces or Pace.SPARING in paces
    assert changes < 60


def test_paused_reader_resumes_after_draining() -> None:
    """A drained request becomes sparing, then runs at full pace."""
    little = ReaderView(1000, read_bytes_s=50_000)
    assert pace(little, Pace.PAUSED) is Pace.SPARING
    assert pace(little, Pace.SPARING) is Pace.FULL
    half_way = ReaderView(100_000, read_bytes_s=20_000)
    assert pace(half_way, Pace.PAUSED) is Pace.PAUSED


@given(readers, pacings)
@example(ReaderView(0, 0.0, 82, 5e-324, 1.0), Pacing(Pace.FULL, suspected=True))
def test_pacing_stays_within_its_bounds(reader, previous) -> None:
    """Holds and times between tokens are bounded, and only sparing requests have the latter."""
    chosen = next_pacing(reader, previous)
    assert 0.0 <= chosen.hold_s <= LONGEST_HOLD_S
    assert 0.0 <= chosen.tpot_s <= LONGEST_TPOT_S
    assert not chosen.tpot_s or chosen.pace is Pace.SPARING


@given(st.floats(0.001, 0.5), st.floats(5, 200), st.floats(1.2, 50), st.booleans())
@example(0.5, 6.0625, 1.5, True)  # its first check finds the reader late
def test_healthy_path_is_never_slowed(rtt_s, tokens_s, margin, coarse) -> None:
    """A path that carries all tokens keeps the full pace. Its tokens are coalesced only at a long
    round trip, and then for a small share of it."""
    token_bytes = 300.0 if coarse else 5.0
    path = EmulatedPath(margin * tokens_s * (225 + token_bytes), rtt_s)
    stream = EmulatedStream(path, tokens_s, token_bytes)
    for _ in range(1000):
        stream.tick()
    held_s = LONG_SHARE * rtt_s if rtt_s >= LONG_RTT_S else 0.0
    assert {(one.pace, one.hold_s) for one in stream.pacings} == {(Pace.FULL, held_s)}


@given(st.floats(0.001, 0.4), st.floats(30, 200))
def test_slow_path_gets_fewer_and_larger_chunks(rtt_s, tokens_s) -> None:
    """A path that carries a quarter of the chunks soon gets larger chunks, at most half as many,
    and carries most of the tokens in them."""
    stream = EmulatedStream(EmulatedPath(tokens_s * 230 / 4, rtt_s), tokens_s)
    stream.run(3.0 + 6 * rtt_s)
    assert stream.pacing.state is PathState.SLOW
    writes, tokens, arrived = stream.writes, stream.sent_tokens, stream.arrived_bytes
    stream.run(30.0)
    assert stream.writes - writes < 0.5 * (stream.sent_tokens - tokens)
    assert stream.sent_tokens - tokens > 0.6 * tokens_s * 30.0
    assert stream.arrived_bytes > arrived


@given(st.floats(0.001, 0.4), st.floats(20, 100))
def test_request_on_a_slow_path_generates_what_the_path_carries(rtt_s, tokens_s) -> None:
    """If coalescing does not help, the request gets the rate of its path, and keeps it busy."""
    token_bytes = 300.0
    path = EmulatedPath(tokens_s * token_bytes / 4, rtt_s)
    stream = EmulatedStream(path, tokens_s, token_bytes)
    stream.run(10.0)
    made, arrived = stream.made_tokens, stream.arrived_bytes
    stream.run(30.0)
    assert stream.made_tokens - made < 0.35 * tokens_s * 30.0
    assert stream.arrived_bytes - arrived > 0.85 * path.bytes_s * 30.0
    assert stream.held_bytes < 4.0 * path.bytes_s + UNTOUCHED_TCP_BYTES


@given(st.floats(0.001, 0.4), st.sampled_from((5.0, 300.0)))
def test_request_recovers_with_its_path(rtt_s, token_bytes) -> None:
    """After the path has become fast, the request soon runs at full pace without coalescing."""
    path = EmulatedPath(40 * (225 + token_bytes) / 5, rtt_s)
    stream = EmulatedStream(path, 40.0, token_bytes)
    stream.run(10.0)
    assert stream.pacing.path_bytes_s is not None
    path.bytes_s *= 100
    stream.run(25.0)
    assert stream.pacing.pace is Pace.FULL
    assert stream.pacing.path_bytes_s is None


@given(st.floats(0.001, 0.4))
def test_stalled_path_pauses_soon(rtt_s) -> None:
    """A request whose path stops is paused within seconds, earlier than without TCP statistics, and
    runs again when the path does."""
    path = EmulatedPath(1e6, rtt_s)
    stream = EmulatedStream(path, 50.0)
    stream.run(2.0)
    rate, path.bytes_s = path.bytes_s, 0.0
    stream.run(STALLED_TCP_S + STALLED_TCP_RTTS * rtt_s + 2.5)
    assert STALLED_TCP_S + STALLED_TCP_RTTS * rtt_s + 2.5 < PAUSED_S
    assert (stream.pacing.pace, stream.pacing.state) == (Pace.PAUSED, PathState.STALLED)
    path.bytes_s = rate
    stream.run(5.0)
    assert stream.pacing.pace is Pace.FULL


def test_short_outage_of_a_healthy_path_changes_nothing() -> None:
    """A retransmission does not slow a request down."""
    path = EmulatedPath(1e6, 0.05)
    stream = EmulatedStream(path, 50.0)
    stream.run(2.0)
    rate, path.bytes_s = path.bytes_s, 0.0
    stream.run(0.3)
    path.bytes_s = rate
    stream.run(3.0)
    assert {one.pace for one in stream.pacings} == {Pace.FULL}


@given(st.floats(0.5, 500), st.floats(1, 500))
def test_stated_rate_is_an_upper_bound(stated_tps, full_tps) -> None:
    """A client that states its rate gets tokens no faster, and one that can take all tokens runs
    like any other."""
    reader = ReaderView(0, full_tps=full_tps, stated_tps=stated_tps, hidden=True)
    chosen = next_pacing(reader, Pacing())
    assert chosen.state is PathState.HIDDEN
    if stated_tps >= full_tps:
        assert (chosen.pace, chosen.tpot_s) == (Pace.FULL, 0.0)
    else:
        assert (chosen.pace, chosen.tpot_s) == (Pace.SPARING, min(1 / stated_tps, LONGEST_TPOT_S))
