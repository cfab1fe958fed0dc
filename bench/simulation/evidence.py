"""What the evidence of n-gram drafts is worth, on recorded texts of an 8B model.

    draftgate bench evidence --json OUT

The survival tables learn from the texts that are not held out, in their order. They then forecast
the drafts of the held-out texts, without learning. A policy that verifies every slot whose survival
exceeds a price gains the accepted tokens less the price of the verified ones. An oracle verifies
exactly the tokens that will be accepted.

A second table compares the deviation and the memory of requests' shifts. It replays 64 sequences at
a time, which learn together, with the drafts that pay at a fixed price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import fmean
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from draftgate.backends.recording import Guess
from draftgate.lab.sim.recording import Recording, load_recording
from draftgate.policies.speculation import survival
from draftgate.policies.speculation.survival import (
    RequestRecord,
    RequestShift,
    Row,
    SurvivalModel,
)

NAME: Final = "llama-3.1-8b"

PRICES: Final = (0.05, 0.2, 0.35, 0.5, 0.7)
"""Prices of a slot in tokens, from an almost idle H100 to a saturated one."""

KINDS: Final[dict[str, Callable[[Guess], tuple[int, int]]]] = {
    "none": lambda _guess: (1, 0),
    "match length": lambda guess: (guess.evidence, 0),
    "match length and agreement": lambda guess: (guess.evidence, guess.agreement),
}
"""The evidence and the agreement of a draft that the tables get to see."""


USED_SHIFTS: Final = ((0.5, 0.9), (survival.SHIFT_DEVIATION, survival.SHIFT_MEMORY))
SHIFTS: Final = (*USED_SHIFTS, (0.25, 0.97))
"""Deviations and memories of requests' shifts: before 2026-11-28, at present, and smaller."""

SHIFT_TEXTS: Final = {
    **{f"{NAME} {task}": (NAME, task, 0.0) for task in ("chat", "summary", "math", "code_edit")},
    **{
        f"smollm2-135m at {temperature}": ("smollm2-135m", None, temperature)
        for temperature in (0.0, 0.7, 1.0)
    },
}
"""Groups of texts: recording, task or None for all, and temperature."""

SEQUENCES: Final = 64
REPLAYED_TOKENS: Final = 400
TEXTS: Final = 75
"""Concurrent sequences, their length, and the most texts of a group, each replayed twice."""


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


class _Replay(NamedTuple):
    """A sequence that replays a text from a position on."""

    guesses: Sequence[Guess]
    first: int
    record: RequestRecord


def gain(texts: Sequence[Sequence[Guess]], price: float, deviation: float, memory: float) -> float:
    """Return the relative gain in tokens per time of the slots that are worth a price.

    A step takes the time 1, and each slot the price. The tables start empty and learn from all
    sequences.

    Args:
        texts: drafts at each position.
        deviation: `survival.SHIFT_DEVIATION`.
        memory: `survival.SHIFT_MEMORY`.
    """
    forgotten = (1.0 - memory) * deviation**-2
    random, model, running = Random(0), SurvivalModel(), list[_Replay]()
    waiting = [text for _ in range(2) for text in random.sample(list(texts), len(texts))]
    tokens_of, tokens, seconds = dict[int, int](), 0, 0.0
    with patch.multiple(survival, SHIFT_MEMORY=memory, _FORGOTTEN=forgotten):
        while waiting or running:
            while waiting and len(running) < SEQUENCES:
                text = waiting.pop()
                by_evidence, by_outcome = (RequestShift(0.0, deviation**-2) for _ in range(2))
                record = RequestRecord(by_evidence, by_outcome)
                running.append(_Replay(text, random.randrange(len(text)), record))
                tokens_of[id(running[-1].record)] = 0
            for replay in tuple(running):
                key = id(replay.record)
                place = (replay.first + tokens_of[key]) % len(replay.guesses)
                slots, accepted = _verified(model, replay, replay.guesses[place], price)
                tokens_of[key] += 1 + accepted
                tokens += 1 + accepted
                seconds += 1.0 + price * slots
                if tokens_of[key] >= REPLAYED_TOKENS:
                    running.remove(replay)
    return tokens / seconds - 1.0


def _verified(model: SurvivalModel, replay: _Replay, guess: Guess, price: float) -> tuple[int, int]:
    """Return the verified and the accepted slots of a draft, and learn from them."""
    if not guess.proposed:
        model.add_outcome(replay.record, 0, rejected=True)
        return 0, 0
    row = model.draft(replay.record, guess.evidence, guess.agreement)
    slots = sum(1 for each in row.of_length(guess.proposed) if each > price)
    accepted = min(guess.agreed, slots)
    # The token after the accepted ones is known, too.
    known = min(guess.agreed, accepted + 1)
    rejected = guess.agreed < min(accepted + 1, guess.proposed)
    model.add_draft(
        replay.record, guess.evidence, known, rejected=rejected, agreement=guess.agreement
    )
    return slots, accepted


def shift_gains(
    shifts: Sequence[tuple[float, float]], *, held_out: bool
) -> dict[str, dict[str, list[float]]]:
    """Return the gains at `PRICES` in percent, by shifts and texts."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, (recording, task, temperature) in SHIFT_TEXTS.items():
        texts = [
            [text.guess("ngram", position) for position in range(text.length)]
            for text in load_recording(recording).all_texts
            if text.held_out == held_out
            and text.temperature == temperature
            and text.task == (task or text.task)
            and "ngram" in text.drafts
        ]
        chosen = Random(0).sample(texts, min(TEXTS, len(texts)))
        for deviation, memory in shifts:
            gains = [round(100 * gain(chosen, price, deviation, memory), 2) for price in PRICES]
            found.setdefault(f"{deviation}, {memory}", {})[name] = gains
    return found


def table(results: dict[str, Any]) -> list[str]:
    """Return the lines of a table of the results."""
    oracle = {"log_loss": 0.0, "brier": 0.0, "net_tokens": results["oracle_net_tokens"]}
    rows = [f"{'evidence':<28} log loss  Brier   net tokens at prices {PRICES}"]
    for name, one in {**results["evidence"], "oracle": oracle}.items():
        net = "  ".join(f"{value:.3f}" for value in one["net_tokens"].values())
        rows.append(f"{name:<28} {one['log_loss']:<9.3f} {one['brier']:<7.3f} {net}")
    for half, gains in results["shift_gains"].items():
        rows.append(f"gain in percent by deviation and memory of shifts, {half} texts")
        for shift, by_texts in gains.items():
            rows += [f"{shift:<12} {name:<24} {values}" for name, values in by_texts.items()]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench evidence`."""
    args = bench_parser("evidence", __doc__).parse_args(arguments)
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
        "shift_gains": {
            "tuning": shift_gains(SHIFTS, held_out=False),
            "held-out": shift_gains(USED_SHIFTS, held_out=True),
        },
    }
    print("\n".join(table(results)))
    write_results(args.json, results)


if __name__ == "__main__":
    main()
