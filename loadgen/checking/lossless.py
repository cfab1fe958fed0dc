"""Did speculation change what was said? A sample of the run is asked again without it.

With coupled noise the text of a request is a function of its seed, whatever was drafted; so the
same request with `speculation: {mode: off}` and the same seed must give the same text. It must do
so within one numerics class only: answers of different classes are not compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import aiohttp

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.sending.client import ClientTimeouts, ask
from draftgate.loadgen.sending.clock import start_clock
from draftgate.loadgen.types import PlannedRequest, Record

CONTEXT: Final = 30
"""Characters shown on either side of the first difference."""

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer and its replay part.

    Attributes:
        index: of the request in the plan.
        at: character of the choice's text from which the two differ.
        run, replay: the texts around that place.
    """

    index: int
    choice: int
    at: int
    run: str
    replay: str


@dataclass(frozen=True, slots=True)
class LosslessCheck:
    """What replaying showed.

    Attributes:
        compared: how many answers were compared.
        drafted: how many of them had draft tokens in them; the others prove nothing.
        differences: the first one of each answer that differed.
        failed: replays that failed, by request: their verdicts in words.
        incomparable: how many replays were of another numerics class.
    """

    compared: int
    drafted: int
    differences: tuple[Difference, ...]
    failed: tuple[tuple[int, str], ...]
    incomparable: int

    @property
    def passed(self) -> bool:
        """Whether something was compared, all of it was equal, and no replay failed."""
        return self.compared > 0 and not self.differences and not self.failed

    @property
    def rate_bound(self) -> float | None:
        """Most share of answers that may differ although no compared one with drafts did.

        The exact (Clopper-Pearson) one-sided bound at 95 %: `1 - 0.05^(1/n)`. None if any differed,
        or nothing with drafts was compared.
        """
        if self.differences or not self.drafted:
            return None
        return float(1 - (1 - CONFIDENCE) ** (1 / self.drafted))


async def check_lossless(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    records: Sequence[Record],
    count: int,
    *,
    seed: int = 0,
    patience: ClientTimeouts | None = None,
) -> LosslessCheck:
    """Replay `count` answers of a run, chosen by `seed`, one at a time without speculation.

    Answers that were not intact cannot be compared and are not chosen; fewer than `count` are
    chosen if there are no more.
    """
    clock, waits = start_clock(), patience or ClientTimeouts()
    comparable, incomparable = list[tuple[Record, Record]](), 0
    failed = []
    for record in choose(records, count, seed):
        again = replay_of(record)
        replayed = await ask(session, url, model, again, clock=clock, patience=waits)
        if replayed.verdict != Verdict.OK:
            failed.append((again.index, f"{replayed.verdict}: {replayed.detail}"))
        elif _numerics(record) != _numerics(replayed):
            incomparable += 1
        else:
            comparable.append((record, replayed))
    found = (first_difference(record, replayed) for record, replayed in comparable)
    return LosslessCheck(
        compared=len(comparable),
        drafted=sum(_drafted(record) > 0 for record, _ in comparable),
        differences=tuple(difference for difference in found if difference is not None),
        failed=tuple(failed),
        incomparable=incomparable,
    )


def choose(records: Sequence[Record], count: int, seed: int) -> list[Record]:
    """Choose intact records, those with draft tokens first; the same for the same run and seed."""
    intact = sorted((r for r in records if r.verdict == Verdict.OK), key=lambda r: r.planned.index)
    random.Random(seed).shuffle(intact)
    return sorted(intact, key=lambda record: _drafted(record) == 0)[:count]


def replay_of(record: Record) -> PlannedRequest:
    """Return the request again, without speculation, and with the seed the server used."""
    question = record.planned.request
    seed = (record.metrics or {}).get("seed")
    again = replace(
        question,
        seed=seed if isinstance(seed, int) else question.seed,
        extra=(*question.extra, ("speculation", {"mode": "off"})),
    )
    return PlannedRequest(record.planned.index, None, again)


def first_difference(record: Record, replayed: Record) -> Difference | None:
    """Return where the texts, or else the ends, of two answers first differ; None if nowhere."""
    ends = zip(record.finish_reasons, replayed.finish_reasons, strict=True)
    texts = zip(record.texts, replayed.texts, strict=True)
    for choice, ((run, replay), (run_end, replay_end)) in enumerate(zip(texts, ends, strict=True)):
        if run == replay and run_end == replay_end:
            continue
        shorter = min(len(run), len(replay))
        at = next((i for i in range(shorter) if run[i] != replay[i]), shorter)
        around = slice(max(0, at - CONTEXT), at + CONTEXT)
        shown = [
            f"{text[around]} [{end}]" if at + CONTEXT >= len(text) else text[around]
            for text, end in ((run, run_end), (replay, replay_end))
        ]
        return Difference(record.planned.index, choice, at, *shown)
    return None


def _drafted(record: Record) -> int:
    report = (record.metrics or {}).get("speculative_decoding")
    drafted = report.get("num_drafted_tokens") if isinstance(report, dict) else None
    return drafted if isinstance(drafted, int) else 0


def _numerics(record: Record) -> object:
    return (record.metrics or {}).get("numerics_class")
