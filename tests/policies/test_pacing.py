"""Back-pressure: only the requests of slow readers yield."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.pacing import PAUSED_BYTES, SPARING_S, UNTOUCHED_BYTES, ReaderView, pace
from draftgate.policies.types import Pace

readers = st.builds(
    ReaderView,
    st.integers(0, 10**6),
    st.floats(0, 60),
    st.integers(0, 2000),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
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
        reader.unread_bytes <= UNTOUCHED_BYTES
        or (reader.drain_s <= SPARING_S and reader.stall_s == 0)
        or reader.read_bytes_s >= reader.made_bytes_s
    )
    if keeps_up and reader.unread_bytes <= PAUSED_BYTES:
        assert pace(reader, Pace.FULL) is Pace.FULL


@given(readers, st.sampled_from(Pace), st.integers(0, 10**5))
def test_larger_backlog_never_speeds_up(reader, previous, more) -> None:
    """A larger backlog never results in a faster pace."""
    worse = ReaderView(
        reader.unsent_bytes + more,
        reader.stall_s,
        reader.waiting_tokens,
        reader.read_bytes_s,
        reader.made_bytes_s,
    )
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
