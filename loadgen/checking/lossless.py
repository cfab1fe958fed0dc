"""Checks that speculation did not change the text by replaying a sample of a run without it.

With coupled noise the text of a request depends only on its seed, not on the drafts. The same
request with `speculation: {mode: off}` and the same seed must therefore give the same text. This
guarantee covers one numerics class, so the check does not compare responses of different classes.
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
    """The first difference between a response and its replay.

    Attributes:
        index: the position of the request in the plan.
        at: the first differing character of the choice's text, from 0.
        run, replay: the texts around that character.
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
        compared: the number of compared responses.
        drafted: how many compared responses contain draft tokens. Only these can reveal an error.
        differences: the first difference of each response that differed.
        failed: the requests whose replay failed, with a description of the verdict.
        incomparable: the number of replays in another numerics class.
    """

    compared: int
    drafted: int
    differences: tuple[Difference, ...]
    failed: tuple[tuple[int, str], ...]
    incomparable: int

    @property
    def passed(self) -> bool:
        """Whether at least one response was compared, all were equal, and no replay failed."""
        return self.compared > 0 and not self.differences and not self.failed

    @property
    def rate_bound(self) -> float | None:
        """Upper bound for the share of drafted responses that differ, or None.

        The bound is the exact (Clopper-Pearson) one-sided bound at 95 %, `1 - 0.05^(1/n)`. It is
        None if a response differed, or if no compared response had drafts.
        """
        if self.differences or not self.drafted:
            return None
        return float(1 - (1 - CONFIDENCE) ** (1 / self.drafted))


async def check_lossless(
    client: OpenAIClient, records: Sequence[Record], count: int, *, seed: int = 0
) -> LosslessCheck:
    """Replay `count` responses of a run, chosen by `seed`, one at a time without speculation.

    A response that was not intact cannot be compared, so the check may replay fewer than `count`.
    """
    comparable, incomparable = list[tuple[Record, Record]](), 0
    failed = []
    for record in choose(records, count, seed):
        replayed = await client.send_request(replay_of(record))
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
    """Choose intact records, preferring records with draft tokens.

    The same run and seed give the same choice.
    """
    intact = sorted((r for r in records if r.verdict == Verdict.OK), key=lambda r: r.planned.index)
    random.Random(seed).shuffle(intact)
    return sorted(intact, key=lambda record: _drafted(record) == 0)[:count]


def replay_of(record: Record) -> PlannedRequest:
    """Return the request without speculation, and with the seed that the server used."""
    request = record.planned.request
    seed = (record.metrics or {}).get("seed")
    again = replace(
        request,
        seed=seed if isinstance(seed, int) else request.seed,
        extra=(*request.extra, ("speculation", {"mode": "off"})),
        flow_deadline_s=None,  # The flow has ended, so its deadline has probably passed.
        flow_id="",
    )
    return PlannedRequest(record.planned.index, None, again)


def first_difference(record: Record, replayed: Record) -> Difference | None:
    """Return the first difference in text or, for equal texts, in finish reason, or None."""
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
