"""The samples of a Prometheus page that somebody asks for, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

_RANKS: Final = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "ep_rank", "attn_tp_rank", "pid"})
"""Labels of processes that work on the same requests: their figures are one figure."""


class Series(NamedTuple):
    """One sample."""

    labels: Mapping[str, str]
    value: float


class Samples:
    """Finite values by the names of samples (a counter's ends with `_total`)."""

    def __init__(self, text: str, names: Iterable[str]) -> None:
        """Read those with these names; a page has hundreds of others, which are not parsed.

        Raises:
            ValueError: it is no such page.
        """
        wanted = frozenset(names)
        lines = [line for line in text.splitlines() if _name_of(line) in wanted]
        self._series: dict[str, list[Series]] = {}
        try:
            families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
        except (IndexError, KeyError) as error:  # the parser's own slips on broken lines
            raise ValueError(f"no page of metrics: {error}") from error
        for family in families:
            for sample in family.samples:
                if math.isfinite(sample.value):
                    series = Series(sample.labels, sample.value)
                    self._series.setdefault(sample.name, []).append(series)

    def of(self, name: str) -> list[Series]:
        """Return the samples of a name, as they stand there."""
        return self._series.get(name, [])

    def total(self, *names: str) -> float | None:
        """Return the sum over replicas of the first of these names that is there.

        Figures that only ranks of one replica tell apart are the same ones and count once, and so
        does a total beside its parts by `priority` (SGLang tells both).
        """
        return next((sum(found) for found in map(self._by_replica, names) if found), None)

    def mean(self, *names: str) -> float | None:
        """As `total`, the mean over replicas."""
        found = next(filter(None, map(self._by_replica, names)), None)
        return None if found is None else sum(found) / len(found)

    def _by_replica(self, name: str) -> list[float]:
        most: dict[frozenset[tuple[str, str]], float] = {}
        for labels, value in self.of(name):
            if labels.get("priority"):
                continue
            key = frozenset(item for item in labels.items() if item[0] not in _RANKS)
            most[key] = max(value, most.get(key, value))
        return list(most.values())


def _name_of(line: str) -> str:
    """Return the name of a line's sample; nothing a page asks for is named `#`."""
    head = line.partition("{")[0] if "{" in line else line
    return head.split(maxsplit=1)[0] if head.strip() else ""
