"""The acceptance of drafts before a worker has verified any, fitted to recorded texts.

    draftgate bench priors --json OUT

The effects of `policies.speculation.draft_prior` are fitted to the texts of the shipped recordings
that are not held out, by logistic regression. All tasks and temperatures of a recording count
alike. A worker then learns from some texts of a recording, with several initial estimates, and
forecasts the first tokens of n-gram drafts in its held-out texts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.harness.provenance import bench_parser, simulated_provenance
from bench.harness.study import running_study
from draftgate.backends.core.drafts import ROOT
from draftgate.backends.recording import Guess, Text
from draftgate.lab.sim.recording import Recording, load_recording
from draftgate.policies.speculation.draft_prior import (
    PriorEffects,
    draft_prior,
    strength,
    temperature_band,
)
from draftgate.policies.speculation.survival import (
    AGREEMENT_EDGES,
    AGREEMENT_ROWS,
    EVIDENCE_EDGES,
    OUTCOME_ROWS,
    POSITIONS,
    RequestRecord,
    SurvivalModel,
    outcome_row,
)

NAMES: Final = ("draftgate-demo", "llama-3.1-8b", "smollm2-135m")
"""Recordings to which the effects are fitted."""

UNKNOWN_EVIDENCE: Final = frozenset({("llama-3.1-8b", "draft_model")})
"""Recordings of proposers without the evidence of their drafts."""

MATCHERS: Final = frozenset({"ngram"})
"""Proposers whose evidence is the length of a match."""

FITTED: Final = ("ngram", "draft_model", "sparse_self")
"""Proposers whose effects are fitted."""

GROUP_TOKENS: Final = 1000.0
"""Weight of a task of a recording at one temperature, in tokens."""

RIDGE: Final = 1.0
"""Information of the normal prior of each effect around 0, in logits^-2."""

NEWTON_STEPS: Final = 30

LEARNED: Final = (0, 1, 4, 16)
"""Numbers of texts from which a worker learns before its forecasts are judged."""

TURNS: Final = 4
"""Choices of these texts."""

JUDGED: Final = 2000
"""Most drafts of held-out texts whose forecasts are judged."""


class Cell(NamedTuple):
    """Drafts with equal effects.

    Attributes:
        group: recording, task and temperature.
        row: row of the evidence or of the last outcome.
        agreement: row of the agreement.
    """

    group: tuple[str, str, float]
    row: int
    agreement: int = 0


Counts = dict[Cell, NDArray[np.float64]]
"""Numbers of accepted and of rejected tokens by position, [2, positions]."""


def count_drafts(recordings: dict[str, Recording], proposer: str) -> tuple[Counts, Counts]:
    """Count a proposer's drafts of the texts that are not held out.

    Returns:
        All drafts by their evidence. The drafts of a worker that verifies every draft, by the
        outcome of the draft before.
    """
    by_evidence: Counts = {}
    by_outcome: Counts = {}
    for name, recording in recordings.items():
        for text in _texts(recording, held_out=False):
            if proposer not in text.drafts:
                continue
            group = name, text.task, text.temperature
            guesses = [text.guess(proposer, position) for position in range(text.length)]
            if (name, proposer) not in UNKNOWN_EVIDENCE:
                for guess in filter(_is_draft, guesses):
                    row = bisect_right(EVIDENCE_EDGES, guess.evidence)
                    agreement = bisect_right(AGREEMENT_EDGES, guess.agreement)
                    _count(by_evidence, Cell(group, row, agreement), guess)
            for row, guess in _verified(guesses):
                _count(by_outcome, Cell(group, row), guess)
    return by_evidence, by_outcome


def fit(counts: Counts, features: Callable[[Cell, int], Sequence[float]]) -> NDArray[np.float64]:
    """Return the effects of features by logistic regression.

    Args:
        features: of a cell at a position.
    """
    totals: dict[tuple[str, str, float], float] = {}
    for cell, tokens in counts.items():
        totals[cell.group] = totals.get(cell.group, 0.0) + float(tokens.sum())
    rows, right, tested = [], [], []
    for cell, tokens in counts.items():
        weight = GROUP_TOKENS / totals[cell.group]
        for position in np.flatnonzero(tokens.sum(0)).tolist():
            rows.append(features(cell, position))
            right.append(weight * tokens[0, position])
            tested.append(weight * tokens[:, position].sum())
    inputs, n = np.array(rows), np.array(tested)
    effects = np.zeros(inputs.shape[1])
    for _ in range(NEWTON_STEPS):
        chances = 1.0 / (1.0 + np.exp(-inputs @ effects))
        gradient = inputs.T @ (np.array(right) - n * chances) - RIDGE * effects
        variance = n * chances * (1.0 - chances)
        information = (inputs.T * variance) @ inputs + RIDGE * np.eye(len(effects))
        effects += np.linalg.solve(information, gradient)
    return effects


def fit_effects(recordings: dict[str, Recording], proposer: str) -> PriorEffects:
    """Return the effects of a proposer's drafts, rounded to hundredths."""
    by_evidence, by_outcome = count_drafts(recordings, proposer)
    matches = proposer in MATCHERS
    agreements = AGREEMENT_ROWS if matches else 1

    def of_draft(cell: Cell, position: int) -> list[float]:
        strong = strength(cell.row, matches=matches)
        indicators = np.eye(agreements)[cell.agreement].tolist()
        return [strong, math.log2(position + 1), cell.group[2], *indicators]

    def of_outcome(cell: Cell, position: int) -> list[float]:
        indicators = np.eye(OUTCOME_ROWS)[cell.row].tolist()
        return [math.log2(position + 1), cell.group[2], *indicators]

    strong, depth, temperature, *agreement = fit(by_evidence, of_draft).round(2).tolist()
    later, warmer, *outcomes = fit(by_outcome, of_outcome).round(2).tolist()
    return PriorEffects(
        matches,
        strong,
        tuple(agreement) if matches else tuple(agreement * AGREEMENT_ROWS),
        depth,
        temperature,
        tuple(outcomes),
        later,
        warmer,
    )


def fresh_model(proposer: str, temperature: float) -> SurvivalModel:
    """Return the estimates of a worker that has verified no draft."""
    return SurvivalModel(*draft_prior(proposer, temperature_band(temperature)))


def restarted_model(proposer: str, temperature: float, texts: Sequence[Text]) -> SurvivalModel:
    """Return the estimates of a worker after an earlier one has learned from these texts."""
    earlier, later = (fresh_model(proposer, temperature) for _ in range(2))
    _learn(earlier, proposer, texts)
    later.by_evidence.restore(earlier.by_evidence.counts())
    return later


def judged(recording: Recording, proposer: str, temperature: float) -> dict[str, Any]:
    """Return Brier scores of forecasts in the held-out texts.

    The scores are listed by the initial estimate and the number of texts learned from.
    """
    learnable, judging = (
        [
            text
            for text in _texts(recording, held_out=held_out)
            if text.temperature == temperature and proposer in text.drafts
        ]
        for held_out in (False, True)
    )
    drafts = [
        guess
        for text in judging
        for guess in (text.guess(proposer, position) for position in range(text.length))
        if _is_draft(guess)
    ]
    drafts = Random(0).sample(drafts, min(JUDGED, len(drafts)))
    scores: dict[str, dict[int, float]] = {}
    starts: dict[str, Callable[[], SurvivalModel]] = {
        "one half": SurvivalModel,
        "fitted": partial(fresh_model, proposer, temperature),
        "restarted": partial(restarted_model, proposer, temperature, learnable),
    }
    for name, start in starts.items():
        scores[name] = {}
        for texts in (*LEARNED, len(learnable)):
            turns = TURNS if 0 < texts < len(learnable) else 1
            several = []
            for turn in range(turns):
                model = start()
                _learn(model, proposer, Random(turn).sample(learnable, texts))
                several.append(_brier(model, drafts))
            scores[name][texts] = round(fmean(several), 4)
    return {"drafts": len(drafts), "brier": scores}


def _texts(recording: Recording, *, held_out: bool) -> Iterator[Text]:
    """Yield a half of the texts. A recording without held-out texts has only the other half."""
    return (text for text in recording.all_texts if text.held_out == held_out)


def _is_draft(guess: Guess) -> bool:
    return guess.proposed > 0


def _verified(guesses: Sequence[Guess]) -> Iterator[tuple[int, Guess]]:
    """Yield the drafts that a worker verifies, with the row of the outcome before each.

    A missing draft counts as rejected, as in `SurvivalModel.add_outcome`.
    """
    row = position = 0
    while position < len(guesses):
        guess = guesses[position]
        yield row, guess
        row = outcome_row(guess.agreed, rejected=_was_rejected(guess))
        position += guess.agreed + 1


def _was_rejected(guess: Guess) -> bool:
    """Return whether a token was wrong, or no token was proposed."""
    if guess.tree is None:
        return guess.agreed < guess.proposed or not guess.proposed
    last = guess.path[-1] if guess.path else ROOT
    return last in guess.tree.parent_places()[: guess.proposed]


def _count(counts: Counts, cell: Cell, guess: Guess) -> None:
    tokens = counts.setdefault(cell, np.zeros((2, POSITIONS)))
    tokens[0, : guess.agreed] += 1.0
    if _was_rejected(guess) and guess.agreed < POSITIONS:
        tokens[1, guess.agreed] += 1.0


def _learn(model: SurvivalModel, proposer: str, texts: Sequence[Text]) -> None:
    for text in texts:
        for position in range(text.length):
            guess = text.guess(proposer, position)
            if _is_draft(guess):
                model.add_draft(
                    RequestRecord(),
                    guess.evidence,
                    guess.agreed,
                    rejected=_was_rejected(guess),
                    agreement=guess.agreement,
                )
    model.by_evidence.refresh()


def _brier(model: SurvivalModel, drafts: Sequence[Guess]) -> float:
    record = RequestRecord()
    return fmean(
        (model.draft(record, guess.evidence, guess.agreement).chances[0] - (guess.agreed > 0)) ** 2
        for guess in drafts
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench priors`."""
    args = bench_parser("priors", __doc__).parse_args(arguments)
    recordings = {name: load_recording(name) for name in NAMES}
    results: dict[str, Any] = {
        "format": "priors/1",
        **simulated_provenance("priors", arguments),
        "recordings": {name: one.source for name, one in recordings.items()},
        "effects": {},
        "forecasts": {},
    }
    judging = [
        (name, temperature)
        for name, one in recordings.items()
        for temperature in sorted({text.temperature for text in _texts(one, held_out=True)})
    ]
    with running_study(args.json, results, "parts") as progress:
        for done, name in enumerate(FITTED, 1):
            effects = fit_effects(recordings, name)
            results["effects"][name] = effects._asdict()
            print(f"{name}: {effects}")
            progress.report("effects of proposers", done, len(FITTED))
        for done, (name, temperature) in enumerate(judging, 1):
            title = f"{name}, temperature {temperature:g}"
            one = results["forecasts"][title] = judged(recordings[name], "ngram", temperature)
            print(f"\n{title}: Brier score of {one['drafts']} drafts after learning from texts")
            for start, scores in one["brier"].items():
                print(f"{start:<28}" + "  ".join(f"{n}: {score}" for n, score in scores.items()))
            progress.report("forecasts", done, len(judging))


if __name__ == "__main__":
    main()
