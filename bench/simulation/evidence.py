"""What the evidence of n-gram drafts is worth, on recorded texts of an 8B model.

    draftgate bench evidence --json OUT

The survival tables learn from the texts that are not held out, in their order. They then forecast
the drafts of the held-out texts, without learning. A policy that verifies every slot whose survival
exceeds a price gains the accepted tokens less the price of the verified ones. An oracle verifies
exactly the tokens that will be accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, Final

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from draftgate.backends.recording import Guess
from draftgate.backends.sim.recording import Recording, load_recording
from draftgate.policies.speculation.survival import RequestRecord, Row, SurvivalModel

NAME: Final = "llama-3.1-8b"

PRICES: Final = (0.05, 0.2, 0.35, 0.5, 0.7)
"""Prices of a slot in tokens, from an almost idle H100 to a saturated one."""

KINDS: Final[dict[str, Callable[[Guess], tuple[int, int]]]] = {
    "none": lambda _guess: (1, 0),
    "match length": lambda guess: (guess.evidence, 0),
    "match length and agreement": lambda guess: (guess.evidence, guess.agreement),
}
"""The evidence and the agreement of a draft that the tables get to see."""


def drafts(recording: Recording, *, held_out: bool) -> Iterator[Guess]:
    """Yield the n-gram drafts of a half of the texts, in their order."""
    for task in recording.tasks:
        for text in recording.texts(task, 0.0):
            if text.held_out == held_out:
                for position in range(text.length):
                    guess = text.guess("ngram", position)
                    if guess.proposed:
                        yield guess


def learned(recording: Recording, kind: Callable[[Guess], tuple[int, int]]) -> SurvivalModel:
    """Return the survivals learned from the texts that are not held out, without shifts."""
    model = SurvivalModel()
    for guess in drafts(recording, held_out=False):
        evidence, agreement = kind(guess)
        rejected = guess.agreed < guess.proposed
        model.add_draft(
            RequestRecord(), evidence, guess.agreed, rejected=rejected, agreement=agreement
        )
    model.by_evidence.refresh()
    return model


def judged(recording: Recording, kind: Callable[[Guess], tuple[int, int]]) -> dict[str, Any]:
    """Return the log loss and the Brier score of the first token, and the net tokens by price."""
    model, record = learned(recording, kind), RequestRecord()
    forecasts = [
        (guess, model.draft(record, *kind(guess))) for guess in drafts(recording, held_out=True)
    ]
    first = [(row.chances[0], float(guess.agreed > 0)) for guess, row in forecasts]
    return {
        "log_loss": round(-fmean(math.log(p if right else 1.0 - p) for p, right in first), 4),
        "brier": round(fmean((p - right) ** 2 for p, right in first), 4),
        "net_tokens": {
            str(price): round(fmean(net_tokens(guess, row, price) for guess, row in forecasts), 3)
            for price in PRICES
        },
    }


def net_tokens(guess: Guess, row: Row, price: float) -> float:
    """Return the accepted tokens less the price of the slots that are worth it."""
    verified = sum(1 for survival in row.of_length(guess.proposed) if survival > price)
    return min(guess.agreed, verified) - price * verified


def table(results: dict[str, Any]) -> list[str]:
    """Return the lines of a table of the results."""
    oracle = {"log_loss": 0.0, "brier": 0.0, "net_tokens": results["oracle_net_tokens"]}
    rows = [f"{'evidence':<28} log loss  Brier   net tokens at prices {PRICES}"]
    for name, one in {**results["evidence"], "oracle": oracle}.items():
        net = "  ".join(f"{value:.3f}" for value in one["net_tokens"].values())
        rows.append(f"{name:<28} {one['log_loss']:<9.3f} {one['brier']:<7.3f} {net}")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench evidence`."""
    args = bench_parser("evidence", __doc__, device=False).parse_args(arguments)
    recording = load_recording(NAME)
    held_out = list(drafts(recording, held_out=True))
    results = {
        "format": "evidence/1",
        **simulated_provenance("evidence", arguments),
        "recording": recording.source,
        "drafts": len(held_out),
        "evidence": {name: judged(recording, kind) for name, kind in KINDS.items()},
        "oracle_net_tokens": {
            str(price): round(fmean((1.0 - price) * guess.agreed for guess in held_out), 3)
            for price in PRICES
        },
    }
    page = table(results)
    print("\n".join(page))
    write_results(
        args, results, "Evidence of n-gram drafts", [f"<pre>{line}</pre>" for line in page]
    )


if __name__ == "__main__":
    main()
