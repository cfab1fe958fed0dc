"""The effect of a client's path on its request, in words."""

from __future__ import annotations

import pytest

from draftgate.policies.pacing import Pacing, PathState, ReaderView, path_reason
from draftgate.policies.types import Pace

SLOW = Pacing(path_bytes_s=4350.0, state=PathState.SLOW, hold_s=0.106)


@pytest.mark.parametrize(
    ("reader", "pacing", "reason"),
    [
        (ReaderView(0, rtt_s=0.01), Pacing(), ""),
        (
            ReaderView(9000, rtt_s=0.02, rwnd_share=0.8),
            SLOW,
            (
                "the path to the client carries 4.35 kB/s (round trip 20 ms, the client reads"
                " slowly): tokens are coalesced for 106 ms"
            ),
        ),
        (
            ReaderView(9000, rtt_s=0.3, retransmits=2),
            SLOW,
            (
                "the path to the client carries 4.35 kB/s (round trip 300 ms, 2 retransmissions):"
                " tokens are coalesced for 106 ms"
            ),
        ),
        (
            ReaderView(9000, stall_s=2.5, rtt_s=0.02),
            Pacing(Pace.PAUSED, state=PathState.STALLED),
            "nothing has reached the client for 2.5 s: paused",
        ),
        (
            ReaderView(0, rtt_s=0.4),
            Pacing(state=PathState.LONG, hold_s=0.02),
            "the round trip to the client takes 400 ms: tokens are coalesced for 20 ms",
        ),
        (
            ReaderView(0, stated_tps=5.0, hidden=True),
            Pacing(Pace.SPARING, tpot_s=0.2, state=PathState.HIDDEN),
            (
                "the client takes at most 5 tokens/s, as it states, a proxy hides the path to the"
                " client: a token every 200 ms without drafts"
            ),
        ),
    ],
)
def test_reason_names_what_limits_the_path(reader: ReaderView, pacing: Pacing, reason: str) -> None:
    """The reason says what is known about the path and what follows, or nothing."""
    assert path_reason(reader, pacing) == reason
