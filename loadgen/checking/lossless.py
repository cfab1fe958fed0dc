"""Checks that speculation did not change the text: replays a sample of a run without it.

With coupled noise the text of a request is a function of its seed, whatever was drafted. The same
request with `speculation: {mode: off}` and the same seed must therefore give the same text. This
holds within one numerics class, so answers of different classes are not compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.sending.client import OpenAIClient
from draftgate.loadgen.types import PlannedRequest, Record

CONTEXT: Final = 30
"""Characters shown on either side of the first difference."""

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer and its replay diverge.

    Attributes:
        index: of the request in the plan.
        at: the first character of the choice's text that differs.
        run, replay: the texts around it.
    """

    index: int
    choice: int
    at: int
    run: str
    replay: str


@dataclass(frozen=True, slots=True)
class LosslessCheck:
    """The result of the replays.

    Attributes:
        compared: how many answers were compared.
        drafted: how many of them contain draft tokens; the others prove nothing.
        differences: the first one of each answer that differed.
        failed: the requests whose replay failed, with the verdict in words.
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
        """Upper bound for the share of answers that differ, if no compared one with drafts did.

        The exact (Clopper-Pearson) one-sided bound at 95 %: `1 - 0.05^(1/n)`. None if an answer
        differed, or none with drafts was compared.
        """
        if self.differences or not self.drafted:
            return None
        return float(1 - (1 - CONFIDENCE) ** (1 / self.drafted))


async def check_lossless(
    client: OpenAIClient, records: Sequence[Record], count: int, *, seed: int = 0
) -> LosslessCheck:
    """Replay `count` answers of a run, chosen by `seed`, one at a time without speculation.

    Answers that were not intact cannot be compared and are not chosen, so there may be fewer.
    """
    comparable, incomparable = list[tuple[Record, Record]](), 0
    failed = []
    for record in choose(records, count, seed):
        replayed = await client.ask(replay_of(record))
        if replayed.verdict != Verdict.OK:
            failed.append((record.planned.index, f"{replayed.verdict}: {replayed.detail}"))
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
    """Return the request again, without speculation, and with the seed that the server used."""
    request = record.planned.request
    seed = (record.metrics or {}).get("seed")
    again = replace(
        request,
        seed=seed if isinstance(seed, int) else request.seed,
        extra=(*request.extra, ("speculation", {"mode": "off"})),
    )
    return PlannedRequest(record.planned.index, None, again)


def first_difference(record: Record, replayed: Record) -> Difference | None:
    """Return where two answers first differ in text, or else in finish reason, if at all."""
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
