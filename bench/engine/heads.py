"""Compare an EAGLE-3 head with the draft model on held-out code: acceptance and speed.

    python -m bench.engine.heads HEAD --json OUT

Both draft for the same prompts, in turn within each round. Speed is output tokens per second of CPU
time, because other programs may use the machine. Texts are equal for both, so the ratio of the
speeds does not depend on the text. The tasks are those of `bench.engine.proposers`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Many
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from bench.engine.proposers import KV_BYTES, TEMPERATURES, Outcome, Tally, run, tasks
from bench.harness.provenance import provenance
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.worker_config import WorkerConfig

SLOTS: Final = (0, 2, 4, 6)
"""Draft lengths. 0 measures the cost of features alone."""

ROUNDS: Final = 2
TASKS: Final = ("completion", "rewrite")
SEQUENCES: Final = 8
"""Sequences in a batch."""


class Arm(NamedTuple):
    """A worker that drafts with one proposer only."""

    proposer: str
    engine: LoadedEngine


def load_arm(proposer: str, draft: str | None, window: int | None) -> Arm:
    """Load the shipped model with a draft model or head, or with the shipped draft model."""
    config = WorkerConfig(
        proposer=proposer,
        draft_model=draft,
        draft_window_tokens=window,
        speculation=f"fixed:{max(SLOTS)}",
        kv_bytes=KV_BYTES,
        max_num_seqs=SEQUENCES,
    )
    return Arm(proposer, load_engine(config))


def by_position(outcomes: Many[Outcome], slots: int) -> list[float | None]:
    """Return the share of tokens accepted at each position, given that all earlier ones were."""
    shares: list[float | None] = []
    for place in range(slots):
        tested = [o for o in outcomes if o.agreed > place or (o.agreed == place and o.rejected)]
        right = sum(o.agreed > place for o in tested)
        shares.append(round(right / len(tested), 3) if tested else None)
    return shares


def measure(arms: Many[Arm]) -> list[dict[str, Any]]:
    """Return a row for each arm, task, temperature and draft length."""
    rows = []
    for task, prompts in tasks(arms[0].engine.worker.tokenizer).items():
        if task not in TASKS:
            continue
        for temperature in TEMPERATURES:
            for slots in SLOTS:
                tallies, speeds = _rounds(arms, prompts, slots, temperature)
                for arm in arms:
                    tally = tallies[arm.proposer]
                    row: dict[str, Any] = {
                        "task": task,
                        "temperature": temperature,
                        "proposer": arm.proposer,
                        "slots": slots,
                        "tokens_per_cpu_s": round(median(speeds[arm.proposer]), 1),
                        **tally.summary(),
                    }
                    row["accepted_by_position"] = by_position(tally.outcomes, slots)
                    rows.append(row)
                    print(row, flush=True)
    return rows


def _rounds(
    arms: Many[Arm], prompts: list[tuple[int, ...]], slots: int, temperature: float
) -> tuple[dict[str, Tally], dict[str, list[float]]]:
    tallies: dict[str, Tally] = {}
    speeds: dict[str, list[float]] = {arm.proposer: [] for arm in arms}
    for turn in range(ROUNDS):
        for arm in arms if turn % 2 else reversed(arms):
            began_s = time.process_time()
            tally = run(arm.engine, prompts, arm.proposer, slots, temperature)
            speeds[arm.proposer].append(tally.tokens / (time.process_time() - began_s))
            tallies[arm.proposer] = tally
    return tallies, speeds


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", help="directory of the head")
    parser.add_argument("--window", type=int, help="attention window of the head, in tokens")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    facts = provenance()
    arms = [load_arm("eagle", args.head, args.window), load_arm("draft_model", None, None)]
    results = {**facts, "rounds": ROUNDS, "sequences": SEQUENCES, "results": measure(arms)}
    args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
