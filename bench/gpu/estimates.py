"""Step times that a review at the desk expects, to compare with the first measurements."""

from __future__ import annotations

from typing import Any, Final

CONTEXT_TOKENS: Final = 1024
FLOOR_MS: Final = {1: 3.5, 8: 3.7, 64: 5.5, 256: 13.0}
OFF_MS: Final = {1: 4.9, 8: 5.1, 64: 7.6, 256: 17.6}
VERIFY_MS: Final = {1: 5.3, 8: 5.8, 64: 12.8}
"""Milliseconds of a step by number of sequences: the bandwidth's limit, a greedy step without
drafts, and a step that verifies 4 n-gram drafts per sequence. Llama-8B in bfloat16 after 1,024
tokens on an H200, within 30% (estimated, not measured, 2026-11-27)."""

TOLERANCE: Final = 0.3


def against_estimates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that have an estimate, with the ratio of measured to estimated time."""
    found = []
    for row in rows:
        expected = {1: OFF_MS, 5: VERIFY_MS}.get(row["tokens"], {}).get(row["batch"])
        if expected is None or row["context_tokens"] != CONTEXT_TOKENS or "ms" not in row:
            continue
        ratio = row["ms"] / expected
        found.append(
            {
                "step": row["name"],
                "batch": row["batch"],
                "floor_ms": FLOOR_MS[row["batch"]],
                "estimated_ms": expected,
                "measured_ms": row["ms"],
                "device_ms": row.get("device_ms"),
                "ratio": round(ratio, 2),
                "as_expected": abs(ratio - 1) <= TOLERANCE,
            }
        )
    return found
