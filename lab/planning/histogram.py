"""The histogram of a workload by the lengths of its requests, and the capacity for its bursts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from draftgate.lab.planning.throughput import Size
from draftgate.policies.values import immutable

PROMPT_EDGES: Final = (0, 25, 50, 100, 250, 500, 1000, 2000, 4000, 8000)
OUTPUT_EDGES: Final = (0, 25, 50, 100, 250, 500, 1000)
"""Lower ends of the ranges of lengths, in tokens, as in Mélange. The last range has no end."""


@immutable
class PlannedLength:
    """A request of a workload.

    Attributes:
        at_s: time of arrival.
        class_name: class of the request, whose drafts are alike.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    class_name: str = ""


@immutable
class Bucket:
    """Requests of a class with similar lengths.

    Attributes:
        prompt_range, output_range: first and last length, in tokens. The last one is None if the
            range has no end.
        size: mean lengths of its requests.
        share: its share of the requests.
    """

    class_name: str
    prompt_range: tuple[int, int | None]
    output_range: tuple[int, int | None]
    size: Size
    share: float

    def __str__(self) -> str:
        prompt, output = (describe_range(one) for one in (self.prompt_range, self.output_range))
        return f"prompts of {prompt} and outputs of {output} tokens"


def describe_range(lengths: Iterable[int | None]) -> str:
    """Return a range of lengths as text, without an end if the last length is None."""
    first, last = lengths
    return f"{first:,} or more" if last is None else f"{first:,} to {last:,}"


def histogram(requests: Sequence[PlannedLength]) -> tuple[list[Bucket], list[int]]:
    """Return the buckets that are not empty, and the index of each request's bucket.

    The buckets are sorted by class and then by lengths.
    """
    members = defaultdict[tuple[str, int, int], list[PlannedLength]](list)
    keys = [
        (
            one.class_name,
            bisect_right(PROMPT_EDGES, one.prompt_tokens) - 1,
            bisect_right(OUTPUT_EDGES, one.output_tokens) - 1,
        )
        for one in requests
    ]
    for key, one in zip(keys, requests, strict=True):
        members[key].append(one)
    places = {key: place for place, key in enumerate(sorted(members))}
    buckets = [
        Bucket(
            class_name,
            _range(PROMPT_EDGES, row),
            _range(OUTPUT_EDGES, column),
            _mean_size(members[class_name, row, column]),
            len(members[class_name, row, column]) / len(requests),
        )
        for class_name, row, column in places
    ]
    return buckets, [places[key] for key in keys]


def burst_factor(
    arrivals_s: Sequence[float], works: Sequence[float], window_s: float, share: float
) -> float:
    """Return the capacity for bursts, as a multiple of the mean work per second.

    Time is cut into windows, and the work that arrives in a window must be done within it. The
    factor is the smallest one with which at least `share` of the requests arrive in a window whose
    work is within the capacity.

    Args:
        arrivals_s: times of arrival, ascending.
        works: work of each request, in any unit.
        window_s: length of a window, about the time that a request may take.

    Returns:
        The factor, at least 1.
    """
    length_s = arrivals_s[-1] - arrivals_s[0] if arrivals_s else 0.0
    total = math.fsum(works)
    if length_s <= window_s or not total > 0.0:
        return 1.0
    by_window = defaultdict[int, list[float]](list)
    for at_s, work in zip(arrivals_s, works, strict=True):
        by_window[int((at_s - arrivals_s[0]) / window_s)].append(work)
    windows = sorted((math.fsum(one), len(one)) for one in by_window.values())
    served, needed = 0, share * len(works)
    for work, requests in windows:
        served += requests
        if served >= needed:
            return max(1.0, work / window_s * length_s / total)
    return max(1.0, windows[-1][0] / window_s * length_s / total)


def _mean_size(requests: Iterable[PlannedLength]) -> Size:
    several = list(requests)
    prompts = sum(one.prompt_tokens for one in several) / len(several)
    outputs = sum(one.output_tokens for one in several) / len(several)
    return Size(max(prompts, 1.0), max(outputs, 1.0))


def _range(edges: Sequence[int], place: int) -> tuple[int, int | None]:
    return edges[place], edges[place + 1] - 1 if place + 1 < len(edges) else None
