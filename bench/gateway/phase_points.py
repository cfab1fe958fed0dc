"""Loads of chats beside bursts of long prompts, and the comparison of policies on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, takewhile
from random import Random
from typing import Any, Final

from draftgate.loadgen.measuring.metrics import distribution, errors, intact, ttft_s
from draftgate.loadgen.planning.arrivals import Gamma
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec

CHAT: Final = "chat"
LONG: Final = "long_document"
PROMPT_TOKENS: Final = {CHAT: 100, LONG: 4000}
OUTPUT_TOKENS: Final = {CHAT: (100, 200), LONG: (32, 32)}
"""Least and most output tokens of a class."""

MOST_REQUESTS: Final = 100_000
"""More requests than a point has, so that all seeds differ."""

COMPARED: Final = (("chat_gap_s", "p99"), ("chat_ttft_s", "mean"), ("long_ttft_s", "mean"))
"""Metrics by which policies are compared. A point has too few requests for a P99 of their TTFT."""

LEAST_LEAD: Final = 0.05
"""Relative difference of the best two policies at which a point has a winner."""


@dataclass(frozen=True, slots=True)
class Point:
    """A load: Poisson arrivals of chats, and bursts of long prompts at fixed intervals.

    Attributes:
        chats_rps: mean rate of chats.
        burst: number of long prompts that arrive at once.
        every_s: interval of the bursts. The first arrives after half of it.
    """

    chats_rps: float
    burst: int
    every_s: float

    def plan(self, seconds: float, number: int, seed: int = 0) -> list[PlannedRequest]:
        """Return the requests of a time interval, in order of arrival.

        Args:
            number: number of the point. The prompts of all points differ.
        """
        first_seed = (1000 * seed + number) * MOST_REQUESTS
        chats_s = Gamma().arrival_times(self.chats_rps, first_seed)
        arrivals = [(at_s, CHAT) for at_s in takewhile(lambda at_s: at_s < seconds, chats_s)]
        burst_s = self.every_s / 2
        while burst_s < seconds:
            arrivals += [(burst_s, LONG)] * self.burst
            burst_s += self.every_s
        draw = Random(first_seed)
        return [
            PlannedRequest(
                index,
                at_s,
                RequestSpec("", (), draw.randint(*OUTPUT_TOKENS[name]), first_seed + index, name),
            )
            for index, (at_s, name) in enumerate(sorted(arrivals))
        ]


def metrics_of(records: Sequence[Record]) -> dict[str, Any]:
    """Return the metrics of a run, in seconds. A metric without values is None.

    `chat_gap_s` has the gaps between the tokens of chats from the arrival of a long prompt to the
    end of its response.
    """
    chats, long_ones = (
        [one for one in intact(records) if one.planned.request.class_name == name]
        for name in (CHAT, LONG)
    )
    bursts_s = [(one.scheduled_s, one.end_s) for one in long_ones]
    values: dict[str, Iterable[float]] = {
        "chat_gap_s": [gap_s for one in chats for gap_s in _gaps_within(one, bursts_s)],
        "chat_ttft_s": filter(None, map(ttft_s, chats)),
        "long_ttft_s": filter(None, map(ttft_s, long_ones)),
    }
    found = {name: distribution(each) for name, each in values.items()}
    return {
        "chats": len(chats),
        "long_prompts": len(long_ones),
        "failed_share": sum(errors(records).values()) / len(records),
        **{name: None if each is None else each.as_dict() for name, each in found.items()},
    }


def _gaps_within(record: Record, intervals_s: Sequence[tuple[float, float]]) -> Iterator[float]:
    """Yield the gaps between the chunks of a record that overlap one of the time intervals."""
    times_s = [chunk.at_s for chunk in record.chunks]
    for before_s, after_s in pairwise(times_s):
        if any(before_s < end_s and begin_s < after_s for begin_s, end_s in intervals_s):
            yield after_s - before_s


def compared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return by metric how often the simulator agrees with the workers.

    The winner of a point is the policy with the least value. Points whose best two policies differ
    by less than `LEAST_LEAD` on the workers have no winner. `pairs` counts all pairs of policies
    that differ by more at a point, and `agreed_pairs` those in the same order in the simulator.

    Args:
        rows: rows with the number of their `point`, their `policy`, and their metrics `real` and
            `simulated`.
    """
    found = {}
    for metric, value in COMPARED:
        won, pairs = list[dict[str, Any]](), list[bool]()
        for point in dict.fromkeys(row["point"] for row in rows):
            real, simulated = (
                {one["policy"]: one[side][metric][value] for one in rows if one["point"] == point}
                for side in ("real", "simulated")
            )
            ranking = sorted(real, key=real.__getitem__)
            pairs += [
                simulated[better] < simulated[worse]
                for better, worse in combinations(ranking, 2)
                if real[worse] / real[better] - 1 > LEAST_LEAD
            ]
            lead = real[ranking[1]] / real[ranking[0]] - 1
            if lead > LEAST_LEAD:
                best = min(simulated, key=simulated.__getitem__)
                won.append({"point": point, "real": ranking[0], "simulated": best, "lead": lead})
        found[f"{metric}.{value}"] = {
            "points": len(won),
            "agreed": sum(one["real"] == one["simulated"] for one in won),
            "pairs": len(pairs),
            "agreed_pairs": sum(pairs),
            "winners": won,
        }
    return found
