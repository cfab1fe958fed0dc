"""The sum of the parts of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.chaos.checker import Outcome

GROUPS = ("gateway", "edge", "engine", "simulated", "upstream")

BAD = (Outcome.ALTERED, Outcome.CUT, Outcome.FAILED, Outcome.OTHER_CLASS)
"""Outcomes of a part that has failed. The text of another class is unknown, so it is unchecked."""


def summary_of(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over parts, and the usage of the longest-lived process of each group."""
    processes = sorted(
        (process for part in parts for process in part["processes"]),
        key=lambda process: -process["seconds"],
    )
    return {
        "parts": len(parts),
        "minutes": round(sum(part["seconds"] for part in parts) / 60, 1),
        "requests": sum(sum(part["outcomes"].values()) for part in parts),
        "outcomes": _sums(part["outcomes"] for part in parts),
        "lost_with_server": sum(part["lost_with_server"] for part in parts),
        "refusals": sum(part["refusals"] for part in parts),
        "resumes": _sums(part["resumes"] for part in parts),
        "faults": dict(Counter(kind for part in parts for _, kind, _ in part["faults"])),
        "failures": [failure for part in parts for failure in part["failures"]],
        "remains": [part["remains"] for part in parts if part["remains"]],
        "longest_lives": {
            group: next((one for one in processes if one["node"].startswith(group)), None)
            for group in GROUPS
        },
    }


def passed(part: dict[str, Any]) -> bool:
    """Return whether every stream of a part was intact, every node exited in order, and nothing
    remained."""
    bad = any(part["outcomes"][outcome.value] for outcome in BAD)
    return not (bad or part["failures"] or part["remains"])


def _sums(counts: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
