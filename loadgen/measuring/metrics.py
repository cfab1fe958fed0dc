"""Defines the metrics of a request, each with the formula that reports print.

Times count from the start of the run. `n` is the number of tokens of the response by the server's
usage. For several choices, which stream at the same time, `n` is their mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor
from typing import Final

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import ChunkColumns, Record

PERCENTILES: Final = (50, 90, 99)


def ttft_s(record: Record) -> float | None:
    """Return the time from the scheduled time to the first text, or None without text."""
    return record.chunks[0].at_s - record.scheduled_s if record.chunks else None


def ttft_sent_s(record: Record) -> float | None:
    """Return the time from sending to the first text, which most tools call TTFT."""
    return record.chunks[0].at_s - record.sent_s if record.chunks else None


def tpot_s(record: Record) -> float | None:
    """Return the mean time per token after the first, or None without a second token.

    All tokens of the first chunk except one count as later tokens. If a server sends k tokens per
    chunk, the result is up to `(k - 1)/(n - 1)` lower than per-token timing inside the server.
    """
    tokens = tokens_of(record)
    if tokens is None or tokens <= 1 or not record.chunks:
        return None
    return (record.chunks[-1].at_s - record.chunks[0].at_s) / (tokens - 1)


def latency_s(record: Record) -> float:
    """Return the time from the scheduled time to the end of the response."""
    return record.end_s - record.scheduled_s


def latency_sent_s(record: Record) -> float:
    """Return the time from sending to the end of the response."""
    return record.end_s - record.sent_s


def normalized_latency_s(record: Record) -> float | None:
    """Return the latency per token (Orca, OSDI 2022), or None without tokens."""
    tokens = tokens_of(record)
    return latency_s(record) / tokens if tokens else None


def fluidity(record: Record) -> float | None:
    """Return the share of tokens that met their deadlines, or None without a TPOT limit.

    The first token is due at `scheduled + TTFT limit`, or without that limit when it arrives. Each
    next token is due one TPOT limit later. A token may use time that earlier tokens saved. If a
    chunk is late, its tokens whose deadlines have passed are late. The next token is then due one
    TPOT limit after the chunk. The definition follows the fluidity-index of Etalon (arXiv
    2407.07000).
    """
    slo, chunks = record.planned.request.slo, record.chunks
    if slo.tpot_s is None or not chunks:
        return None
    due_s = chunks[0].at_s if slo.ttft_s is None else record.scheduled_s + slo.ttft_s
    in_time = total = 0.0
    for at_s, tokens in zip(_times_s(record), tokens_per_chunk(record), strict=True):
        if at_s <= due_s:
            in_time += tokens
            due_s += tokens * slo.tpot_s
        else:
            late = min(tokens, ceil((at_s - due_s) / slo.tpot_s))
            in_time += tokens - late
            due_s = at_s + (tokens - late + 1) * slo.tpot_s
        total += tokens
    return in_time / total if total else None


def chunk_gaps_s(record: Record) -> list[float]:
    """Return the times between chunks with text, as a reader perceives them."""
    return [after_s - before_s for before_s, after_s in pairwise(_times_s(record))]


def _times_s(record: Record) -> Sequence[float]:
    chunks = record.chunks
    return chunks.at_s if isinstance(chunks, ChunkColumns) else [chunk.at_s for chunk in chunks]


def tokens_per_chunk(record: Record) -> list[float]:
    """Return the tokens of each chunk as reported, or else the mean of the response."""
    if isinstance(record.chunks, ChunkColumns):
        return list(map(float, record.chunks.tokens))
    reported = [chunk.tokens for chunk in record.chunks]
    if all(tokens is not None for tokens in reported):
        return [float(tokens or 0) for tokens in reported]
    total = completion_tokens(record)
    return [total / len(reported)] * len(reported) if total is not None else []


def itls_s(record: Record) -> list[float]:
    """Return the inter-token latencies: the gap before each chunk, per token of the chunk.

    The latency counts once for each token of the chunk (rounded if the number is a mean), as if the
    chunk were that many chunks of one token.
    """
    itls: list[float] = []
    gaps_s, sizes = chunk_gaps_s(record), tokens_per_chunk(record)[1:]
    if sizes.count(1.0) == len(gaps_s):  # the usual case without drafts
        return gaps_s
    for gap_s, tokens in zip(gaps_s, sizes, strict=False):
        if tokens > 0:
            itls.extend([gap_s / tokens] * max(1, round(tokens)))
    return itls


def completion_tokens(record: Record) -> int | None:
    """Return the tokens of all choices by the server's usage, or None without a usage."""
    tokens = (record.usage or {}).get("completion_tokens")
    return tokens if isinstance(tokens, int) and tokens >= 0 else None


def tokens_of(record: Record) -> float | None:
    """Return `n`, the mean number of tokens of a choice."""
    total = completion_tokens(record)
    return None if total is None else total / record.planned.request.n


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the reports.

    Attributes:
        key: its name in the summary, which ends with the unit.
        title: its name for readers.
        formula: its definition for readers.
        values: a function of a record that returns no value, one value, or one per chunk or token.
    """

    key: str
    title: str
    formula: str
    values: Callable[[Record], Sequence[float]]

    @property
    def in_seconds(self) -> bool:
        """Whether the metric is a time rather than a plain number."""
        return self.key.endswith("_s")


def _one(value: Callable[[Record], float | None]) -> Callable[[Record], Sequence[float]]:
    def values(record: Record) -> Sequence[float]:
        known = value(record)
        return () if known is None else (known,)

    return values


_ALL: Final = (
    Metric("ttft_s", "TTFT", "first text - scheduled", _one(ttft_s)),
    Metric("ttft_sent_s", "TTFT (sent)", "first text - sent", _one(ttft_sent_s)),
    Metric("tpot_s", "TPOT", "(last text - first text) / (n - 1)", _one(tpot_s)),
    Metric("latency_s", "latency", "end of stream - scheduled", _one(latency_s)),
    Metric("latency_sent_s", "latency (sent)", "end of stream - sent", _one(latency_sent_s)),
    Metric("normalized_latency_s", "latency / token", "latency / n", _one(normalized_latency_s)),
    Metric("chunk_gap_s", "chunk gap", "text(i) - text(i - 1), all chunks", chunk_gaps_s),
    Metric("tokens_per_chunk", "tokens per chunk", "reported, else n / chunks", tokens_per_chunk),
    Metric("itl_s", "ITL", "chunk gap / tokens of the chunk, once per token", itls_s),
    Metric("fluidity", "fluidity", "share of tokens within their deadlines", _one(fluidity)),
)

METRICS: Final[Mapping[str, Metric]] = {metric.key: metric for metric in _ALL}
"""The metrics by key. Their values are of intact responses. Values of chunks and tokens are pooled
over requests."""

PERCENTILE_FORMULA: Final = (
    "pP: the value at position (N - 1) P/100 of N ascending values, from 0, interpolated"
    " linearly between neighbours (type 7 of Hyndman and Fan, numpy's default)"
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A summary of some values. `percentiles` has one value for each of `PERCENTILES`."""

    count: int
    mean: float
    percentiles: tuple[float, ...]

    def as_dict(self) -> dict[str, float]:
        """Return mean and percentiles by name."""
        named = zip(PERCENTILES, self.percentiles, strict=True)
        return {"mean": self.mean, **{f"p{p}": value for p, value in named}}


def distribution(values: Iterable[float]) -> Distribution | None:
    """Return the distribution of values, or None without values."""
    known = sorted(values)
    if not known:
        return None
    percentiles = tuple(percentile(known, p / 100) for p in PERCENTILES)
    return Distribution(len(known), sum(known) / len(known), percentiles)


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return a percentile, with `share` from 0 to 1, by `PERCENTILE_FORMULA`."""
    place = share * (len(ascending) - 1)
    below, above = ascending[floor(place)], ascending[ceil(place)]
    return below + (above - below) * (place - floor(place))


def values_of(metric: Metric, records: Iterable[Record]) -> list[float]:
    """Return the values of a metric over all intact responses."""
    return [value for record in intact(records) for value in metric.values(record)]


def intact(records: Iterable[Record]) -> list[Record]:
    """Return the records of intact responses."""
    return [record for record in records if record.verdict == Verdict.OK]


def errors(records: Iterable[Record]) -> dict[str, int]:
    """Return how many requests failed, by cause, in alphabetical order."""
    return dict(sorted(Counter(r.verdict for r in records if r.verdict != Verdict.OK).items()))
