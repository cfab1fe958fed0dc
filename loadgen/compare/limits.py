"""How much worse a figure may get: `FIGURE[:POINT]:MOST`, e.g. `ttft_s:p90:5%`."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Final

from draftgate.loadgen.compare.measures import POINTS

POINT_OF: Final = {
    **dict.fromkeys(("ttft_s", "tpot_s", "latency_s", "chunk_gap_s"), tuple(POINTS)),
    "fluidity": ("mean",),
    **dict.fromkeys(("attainment", "goodput_rps", "accepted_tokens_per_s"), ("",)),
}
"""The statistics that can be compared, by figure."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most by which a statistic may get worse and be no regression.

    Attributes:
        relative: of the first run's value.
        absolute: in the figure's unit.
    """

    key: str
    point: str
    relative: float = 0.0
    absolute: float = 0.0

    @property
    def in_words(self) -> str:
        """As it was said."""
        most = f"{self.relative * 100:g}%" if self.relative else f"{self.absolute:g}"
        return ":".join(part for part in (self.key, self.point, most) if part)


def parse_limit(text: str) -> Limit:
    """Return a limit from its words.

    Raises:
        ValueError: there is no such figure or statistic, or no number.
    """
    key, *rest = text.split(":")
    points = POINT_OF.get(key)
    if points is None:
        raise ValueError(f"threshold {text!r}: no figure {key!r}; there are {', '.join(POINT_OF)}")
    if not rest:
        raise ValueError(f"threshold {text!r}: how much worse? e.g. {text}:5%")
    *named, most = rest
    point = ":".join(named) or points[0]
    if point not in points or (not named and len(points) > 1):
        raise ValueError(f"threshold {text!r}: which one of {', '.join(points)}?")
    try:
        value = float(most.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0:
        raise ValueError(f"threshold {text!r}: {most!r} is neither a number nor a percentage")
    if most.endswith("%"):
        return Limit(key, point, relative=value / 100)
    return Limit(key, point, absolute=value)
