"""Goals and the metrics that they bound. A missed goal is a finding, not an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

Row = dict[str, Any]
Rows = list[Row]


class Goal(NamedTuple):
    """A bound on a metric.

    Attributes:
        figure: description of the metric.
        measured: function that reads the metric from the rows of a result, by part. It returns None
            if the metric was not measured.
        bound: the limit, a minimum if `at_least` is set and a maximum otherwise.
    """

    figure: str
    measured: Callable[[dict[str, Rows]], float | None]
    bound: float
    at_least: bool = True


def _steps(result: dict[str, Rows], key: str, **wanted: Any) -> list[float]:
    rows = _where(result["steps"], **wanted)
    return [row[key] for row in rows if key in row]


def _where(rows: Rows, **wanted: Any) -> Iterator[Row]:
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            yield row


def _least(figures: list[float]) -> float | None:
    return min(figures, default=None)


def _most(figures: list[float]) -> float | None:
    return max(figures, default=None)


def _batched_speedup(result: dict[str, Rows]) -> float | None:
    rows = _where(result["steps"], name="decode")
    return _least([row["speedup"] for row in rows if row["batch"] >= 8 and "speedup" in row])


def _verify_over_decode(result: dict[str, Rows]) -> float | None:
    """Return the largest ratio of a verify step of 5 tokens to a decode step (batch 1, 82M)."""
    ratios = []
    for row in _where(result["steps"], name="verify", model="random-82m", batch=1, tokens=5):
        place = {name: row[name] for name in ("model", "dtype", "batch", "context_tokens")}
        ratios += [row["ms"] / one for one in _steps(result, "ms", name="decode", **place)]
    return _most(ratios)


def _replay_speedup(result: dict[str, Rows]) -> float | None:
    rows = [row for row in _where(result["replay"], batch=1) if row["policy"] != "off"]
    return _most([row["speedup"] for row in rows if row["speedup"] is not None])


def _of_8b(result: dict[str, Rows], key: str, **wanted: Any) -> list[float]:
    return _steps(result, key, model="random-8b", **wanted)


GOALS: Final[dict[str, tuple[Goal, ...]]] = {
    "cpu": (
        Goal("decode over transformers, batch 8 and above", _batched_speedup, 1.5),
        Goal(
            "verify of 5 over decode, 82M, batch 1, the worse dtype",
            _verify_over_decode,
            1.06,
            at_least=False,
        ),
        Goal(
            "share of read bandwidth, 82M, decode, batch 1, the worse dtype",
            lambda r: _least(
                _steps(r, "share_of_bandwidth", name="decode", model="random-82m", batch=1)
            ),
            0.75,
        ),
        Goal(
            "prefill, 82M, tokens/s, the faster dtype",
            lambda r: _most(_steps(r, "tokens_per_s", name="prefill", model="random-82m")),
            5000.0,
        ),
    ),
    "cuda": (
        Goal(
            "share of copy bandwidth, 8B, batch 1, end to end",
            lambda r: _least(
                [
                    row["share_of_bandwidth"]
                    for row in _where(r["replay"], model="random-8b", policy="off", batch=1)
                ]
            ),
            0.85,
        ),
        Goal(
            "step over roofline, 8B, decode, batch 64 after 2,048",
            lambda r: _most(
                _of_8b(r, "over_roofline", name="decode", batch=64, context_tokens=2048)
            ),
            1.25,
            at_least=False,
        ),
        Goal(
            "GPU idle, 8B, batch 8 and above",
            lambda r: _most(
                [row["gpu_idle_share"] for row in _where(r["idle"], model="random-8b")]
            ),
            0.03,
            at_least=False,
        ),
        Goal(
            "replay speed-up, 8B, batch 1, the best length",
            lambda r: _replay_speedup({"replay": list(_where(r["replay"], model="random-8b"))}),
            2.5,
        ),
        Goal(
            "share of matrix rate, 8B, prefill",
            lambda r: _least(_of_8b(r, "share_of_matrix_rate", name="prefill")),
            0.55,
        ),
        Goal(
            "--exact over plain, 8B, the dearest step",
            lambda r: _most(_of_8b(r, "exact_over_plain")),
            1.10,
            at_least=False,
        ),
        Goal("steps over transformers, the least", lambda r: _least(_steps(r, "speedup")), 1.0),
    ),
}
"""Goals by type of device. `bench kernels` has the goals of single kernels."""


def judged(device_type: str, result: dict[str, Rows]) -> Rows:
    """Return each goal with its result, if the metric was measured."""
    return [_judge(goal, goal.measured(result)) for goal in GOALS[device_type]]


def _judge(goal: Goal, figure: float | None) -> Row:
    row: Row = {
        "figure": goal.figure,
        "goal": f"{'at least' if goal.at_least else 'at most'} {goal.bound:g}",
        "measured": None if figure is None else round(figure, 3),
    }
    if figure is not None:
        row["met"] = figure >= goal.bound if goal.at_least else figure <= goal.bound
    return row
