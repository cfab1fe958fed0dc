"""Tests of sessions, which keep conversations on their workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.routing.sessions import Sessions
from draftgate.policies.routing.types import CachedPrefix

NAMES = st.text("abcdef", min_size=1, max_size=2)
STEPS = st.lists(
    st.tuples(NAMES, st.sampled_from("xy"), st.integers(0, 50), st.floats(0, 30)), max_size=60
)


@given(STEPS, st.integers(1, 5))
def test_table_is_bounded_and_has_the_latest_sessions(
    steps: list[tuple[str, str, int, float]], most: int
) -> None:
    """The table never exceeds its bound, forgets expired sessions, and keeps the latest others."""
    table, now_s = Sessions(most, lasts_s=20.0), 0.0
    latest: dict[str, tuple[str, int, float]] = {}
    for name, worker_id, tokens, pause_s in steps:
        now_s += pause_s
        table.record(name, worker_id, tokens, now_s)
        latest.pop(name, None)
        latest[name] = worker_id, tokens, now_s
        alive = {
            key: value for key, value in list(latest.items())[-most:] if value[2] + 20.0 > now_s
        }
        assert len(table) == len(alive)
        for key in latest:
            found = table.cached(key, 40, now_s)
            if key not in alive:
                assert found == {}
            else:
                place, known, _ = alive[key]
                assert found == {place: CachedPrefix(min(known, 39))}
        assert table.cached(name, 0, now_s) == {worker_id: CachedPrefix(0)}
        assert table.cached(name, 40, now_s + 20.0) == {}
