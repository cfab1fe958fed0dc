"""How far survivals can be believed: forecasts against what became of recorded drafts.

    python -m bench.engine.survival --json bench/results/survival.json

Reads the drafts that `bench.engine.proposers` recorded, learns from the prompts of its
training split, and forecasts, draft by draft and learning on, those of the held-out split. `found`
forecasts know a draft's evidence, `foreseen` ones only how the last draft ended. Counts, not times:
they do not depend on the machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.engine.record import provenance
from draftgate.policies.calibration import brier_score, calibration_error, reliability
from draftgate.policies.survival import Acceptance, RequestRecord, Survivals, evidence_row

RECORDED: Final = Path("docs/measurements")
SOURCES: Final = ("ngram", "draft_model", "sparse_self")


class Recorded(NamedTuple):
    """A draft and what became of it; see `bench.engine.proposers`."""

    proposer: str
    task: str
    temperature: float
    prompt: int
    evidence: int
    proposed: int
    agreed: int
    rejected: bool


@dataclass
class Request:
    """What is known of one request's drafts."""

    record: RequestRecord = field(default_factory=RequestRecord)
    acceptance: Acceptance = field(default_factory=Acceptance)


class Forecasts:
    """Estimates under comparison, for drafts of one source."""

    def __init__(self) -> None:
        """Know nothing."""
        self.survivals = Survivals()
        self.overall = Acceptance()
        self.requests: dict[tuple[str, float, int], Request] = {}

    def learn(self, draft: Recorded) -> None:
        """Learn what became of a draft."""
        request, rejected = self._request(draft), bool(draft.rejected)
        self.survivals.learn(request.record, draft.evidence, draft.agreed, rejected=rejected)
        self.overall.observe(draft.agreed, rejected=rejected)
        request.acceptance.observe(draft.agreed, rejected=rejected)

    def of(self, draft: Recorded) -> dict[str, Callable[[int], float]]:
        """Return what each estimate says of a slot's survival, by position from 0."""
        request, survivals = self._request(draft), self.survivals
        overall = self.overall.rate()
        own = request.acceptance.rate(prior=overall)
        rows = {
            "found, table": survivals.found.row(evidence_row(draft.evidence)),
            "found": survivals.of_found(request.record, draft.evidence),
            "foreseen, table": survivals.predicted.row(request.record.last_outcome),
            "foreseen": survivals.of_predicted(request.record),
        }
        return {
            "one rate": lambda position: overall ** (position + 1),
            "rate of the request": lambda position: own ** (position + 1),
            **{name: row.survivals.__getitem__ for name, row in rows.items()},
        }

    def _request(self, draft: Recorded) -> Request:
        return self.requests.setdefault((draft.task, draft.temperature, draft.prompt), Request())


def measure(source: str, train: list[Recorded], held_out: list[Recorded]) -> list[dict[str, Any]]:
    """Return a row for each estimate: its Brier score and reliability on the held-out drafts."""
    forecasts = Forecasts()
    for draft in train:
        if draft.proposer == source:
            forecasts.learn(draft)
    forecasts.requests.clear()
    said: dict[str, list[float]] = {}
    came: list[bool] = []
    for draft in held_out:
        if draft.proposer != source:
            continue
        # A draft that ended unrejected says nothing of what would have come behind it.
        tested = draft.proposed if draft.rejected else draft.agreed
        for name, forecast in forecasts.of(draft).items():
            said.setdefault(name, []).extend(map(forecast, range(tested)))
        came.extend(position < draft.agreed for position in range(tested))
        forecasts.learn(draft)
    rows = []
    for name, chances in said.items():
        bins = reliability(chances, came)
        rows.append(
            {
                "proposer": source,
                "estimate": name,
                "brier": round(brier_score(chances, came), 4),
                "calibration_error": round(calibration_error(bins), 4),
                "slots": len(came),
                "bins": [(round(b.forecast, 3), round(b.observed, 3), b.size) for b in bins],
            }
        )
    return rows


def read_drafts(split: str) -> list[Recorded]:
    """Return the recorded drafts of a split, `train` or `held-out`, in order."""
    path = RECORDED / f"proposers-{split}.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()[1:]
    return [Recorded(*json.loads(line)) for line in lines]


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    train, held_out = read_drafts("train"), read_drafts("held-out")
    rows = [row for source in SOURCES for row in measure(source, train, held_out)]
    for row in rows:
        print(
            f"{row['proposer']:12} {row['estimate']:20} {row['brier']} {row['calibration_error']}"
        )
    path.write_text(json.dumps({**provenance(), "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
