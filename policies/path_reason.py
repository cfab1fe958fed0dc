"""The effect of a client's path on its request, in words."""

from __future__ import annotations

from draftgate.policies.pacing import Pacing, PathState, ReaderView
from draftgate.policies.types import Pace


def path_reason(reader: ReaderView, pacing: Pacing) -> str:
    """Return what is known about the path to a client and how its request runs for that reason.

    The result is empty for a path that changes nothing.
    """
    parts = []
    if reader.stated_tps is not None:
        parts.append(f"the client takes at most {reader.stated_tps:.3g} tokens/s, as it states")
    if reader.hidden:
        parts.append("a proxy hides the path to the client")
    if pacing.state is PathState.STALLED:
        parts.append(f"nothing has reached the client for {reader.stall_s:.1f} s")
    elif pacing.path_bytes_s is not None:
        parts.append(_slow_path(reader, pacing.path_bytes_s))
    elif pacing.state is PathState.LONG and reader.rtt_s is not None:
        parts.append(f"the round trip to the client takes {reader.rtt_s * 1e3:.0f} ms")
    effects = _effects(pacing)
    return ", ".join(parts) + (f": {effects}" if parts and effects else "")


def _slow_path(reader: ReaderView, path_bytes_s: float) -> str:
    """Return what a slow path carries, and what limits it as far as it is known."""
    found = f"the path to the client carries {path_bytes_s / 1e3:.3g} kB/s"
    if reader.full_bytes_s:
        found += f" of {reader.full_bytes_s / 1e3:.3g} kB/s"
    details = []
    if reader.rtt_s is not None:
        details.append(f"round trip {reader.rtt_s * 1e3:.3g} ms")
    if reader.retransmits:
        details.append(f"{reader.retransmits} retransmissions")
    if reader.rwnd_share >= 0.5:
        details.append("the client reads slowly")
    return f"{found} ({', '.join(details)})" if details else found


def _effects(pacing: Pacing) -> str:
    effects = []
    if pacing.hold_s:
        effects.append(f"tokens are coalesced for {pacing.hold_s * 1e3:.0f} ms")
    if pacing.pace is Pace.PAUSED:
        effects.append("paused")
    elif pacing.tpot_s:
        effects.append(f"a token every {pacing.tpot_s * 1e3:.3g} ms without drafts")
    elif pacing.pace is Pace.SPARING:
        effects.append("after all others without drafts")
    return ", ".join(effects)
