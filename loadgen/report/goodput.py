"""Goodputs read off several rates, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from draftgate.loadgen.report.formatting import NOTHING, number
from draftgate.loadgen.report.runs import RatePoint
from draftgate.loadgen.sweep.goodput import readings

HEAD: Final = ("goodput, requests/s", "share", "read off", "surely between")
NOTES: Final = (
    "Read off: interpolated between the last rate that holds and the next. Surely between: the"
    " highest rate that holds and the lowest that does not, with 95 % confidence each."
)


def goodput_rows(points: Sequence[RatePoint]) -> Iterator[list[str]]:
    """Yield a line for each name and share; none where there is only one rate."""
    if len({point.rate_rps for point in points}) < 2:
        return
    for reading in readings(points):
        if reading.rate_rps is not None:
            read = number(reading.rate_rps)
        elif reading.holds_rps is None:
            read = "below all rates"
        else:
            read = f"at least {number(reading.holds_rps)}"
        ends = (reading.low_rps, reading.high_rps)
        sure = " and ".join(NOTHING if end is None else number(end) for end in ends)
        yield [reading.name, f"{reading.share:.0%}", read, sure]
