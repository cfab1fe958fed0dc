"""How each engine names its figures: a table, and one function that reads by it.

Names were looked up in the sources of the engines (2026-11-22):

    vLLM       vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py (stored copies; V1 called
               kv_cache_usage_perc gpu_cache_usage_perc up to 0.9). Counters end with _total on the
               page. The drafts' counters are there if and only if it speculates.
    SGLang     python/sglang/srt/observability/metrics_collector.py (stored copy; before it was
               srt/metrics/collector.py). All gauges are there whether it speculates or not; means
               are those of the last interval of decoding, some 40 steps.
    llama.cpp  tools/server/server-task.cpp of the source that llama-cpp-python 0.3.36 is made of,
               and a page of the server built from it. The counters of drafts are always there.
               `llamacpp:kv_cache_usage_ratio` and `kv_cache_tokens` are gone from it; older ones
               had them, but with the caches of idle slots, which are given up when somebody comes:
               they say nothing about room, and are not read.
    Draftgate  gateway/telemetry/metric_definitions.py. It also shows vLLM's names, so it is
               looked for first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from draftgate.backends.openai.metrics.reading import DraftTotals, Reading
from draftgate.backends.openai.metrics.samples import Samples, Series
from draftgate.policies.speculation.upstream_speculation import DraftMeans


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of one engine. An empty one says that it has no such figure.

    Attributes:
        running: gauge of running sequences; a page with it is this engine's.
        waiting: gauge of queued ones.
        max_sequences: gauge of the most that run.
        kv_usage: gauges of the share of KV memory in use; the first that is there counts.
        kv_tokens: gauge of the tokens that KV memory holds.
        kv_info: gauge whose labels `num_gpu_blocks` and `block_size` say how much there is.
        totals: counters of drafts, of their tokens and of those accepted.
        shows_only_own: whether these are there only if it speculates; else they must have moved.
        means: reads means of drafts from gauges; None where they tell none.
        gauges_of_means: the names of these gauges.
        price, acceptance: gauges of what it decides by, if it is a Draftgate.
    """

    engine: str
    running: str
    waiting: str
    max_sequences: str = ""
    kv_usage: tuple[str, ...] = ()
    kv_tokens: str = ""
    kv_info: str = ""
    totals: tuple[str, str, str] | None = None
    shows_only_own: bool = False
    means: Callable[[Samples], DraftMeans | None] | None = None
    gauges_of_means: tuple[str, ...] = ()
    price: str = ""
    acceptance: str = ""

    def names(self) -> tuple[str, ...]:
        """Return every name that it reads."""
        single = (
            self.running,
            self.waiting,
            self.max_sequences,
            self.kv_tokens,
            self.kv_info,
            self.price,
        )
        several = (*self.kv_usage, *(self.totals or ()), *self.gauges_of_means, self.acceptance)
        return tuple(name for name in (*single, *several) if name)


_ACCEPT_LENGTH: Final = "sglang:spec_accept_length"
_ACCEPT_RATE: Final = "sglang:spec_accept_rate"
_DRAFT_TOKENS: Final = "sglang:spec_num_draft_tokens"


def _sglang_means(samples: Samples) -> DraftMeans | None:
    """Return the means of drafts: both lengths there count the token that comes in any case.

    Older versions do not say how long drafts are, but which share of them is accepted.
    """
    length, tokens = samples.mean(_ACCEPT_LENGTH), samples.mean(_DRAFT_TOKENS)
    if not length or length < 1.0:
        return None
    accepted = length - 1.0
    if tokens is not None and tokens > 1.0:
        return DraftMeans(max(tokens - 1.0, accepted), accepted)
    rate = samples.mean(_ACCEPT_RATE)
    if rate is None or not 0.0 < rate <= 1.0 or not accepted:
        return None
    return DraftMeans(accepted / rate, accepted)


DIALECTS: Final = (
    Dialect(
        "draftgate",
        running="draftgate_running_sequences",
        waiting="draftgate_waiting_requests",
        totals=(
            "draftgate_spec_steps_total",
            "draftgate_drafted_tokens_total",
            "draftgate_accepted_tokens_total",
        ),
        price="draftgate_price_tokens",
        acceptance="draftgate_acceptance_ratio",
    ),
    Dialect(
        "vllm",
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        kv_info="vllm:cache_config_info",
        totals=(
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        ),
        shows_only_own=True,
    ),
    Dialect(
        "sglang",
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        max_sequences="sglang:max_running_requests",
        kv_usage=("sglang:token_usage",),
        kv_tokens="sglang:max_total_num_tokens",
        means=_sglang_means,
        gauges_of_means=(_ACCEPT_LENGTH, _ACCEPT_RATE, _DRAFT_TOKENS),
    ),
    Dialect(
        "llama.cpp",
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
        totals=(
            "llamacpp:spec_decode_num_drafts_total",
            "llamacpp:spec_decode_num_draft_tokens_total",
            "llamacpp:spec_decode_num_accepted_tokens_total",
        ),
    ),
)

_MOST: Final = float(1 << 40)
"""Counts beyond are no engine's, and these fit any wire."""

_NAMES: Final = frozenset(name for dialect in DIALECTS for name in dialect.names())


def read_metrics(text: str) -> Reading | None:
    """Return what a page says; None if it is of no engine known here.

    Raises:
        ValueError: it is no page of metrics.
    """
    samples = Samples(text, _NAMES)
    for dialect in DIALECTS:
        running = samples.total(dialect.running)
        if running is not None:
            return _read(dialect, samples, _count(running))
    return None


def _read(dialect: Dialect, samples: Samples, running: int) -> Reading:
    blocks, block_tokens = _kv_memory(dialect, samples)
    totals = _totals(dialect, samples)
    means = dialect.means(samples) if dialect.means is not None else None
    moved = totals is not None and (dialect.shows_only_own or totals.drafts > 0)
    usage = samples.mean(*dialect.kv_usage)
    return Reading(
        dialect.engine,
        running,
        _count(samples.total(dialect.waiting) or 0.0),
        _count(samples.total(dialect.max_sequences) or 0.0),
        None if usage is None else min(max(usage, 0.0), 1.0),
        blocks,
        block_tokens,
        drafts=moved or bool(dialect.means and samples.mean(_ACCEPT_LENGTH)),
        totals=totals if moved else None,
        means=means,
        price=samples.mean(dialect.price),
        acceptance=samples.mean(dialect.acceptance),
    )


def _totals(dialect: Dialect, samples: Samples) -> DraftTotals | None:
    if dialect.totals is None:
        return None
    found = [samples.total(name) for name in dialect.totals]
    drafts, drafted, accepted = (-1.0 if value is None else value for value in found)
    return None if min(drafts, drafted, accepted) < 0.0 else DraftTotals(drafts, drafted, accepted)


def _kv_memory(dialect: Dialect, samples: Samples) -> tuple[int, int]:
    """Return the blocks of the KV memory, 0 where nobody says, and the tokens of one."""
    tokens = samples.total(dialect.kv_tokens)
    if tokens is not None:
        return _count(tokens), 1
    found = [_blocks(series) for series in samples.of(dialect.kv_info)]
    if not found or not all(blocks for blocks, _ in found):
        return 0, 16
    return sum(blocks for blocks, _ in found), found[0][1]


def _blocks(series: Series) -> tuple[int, int]:
    """Return blocks and tokens of a block; 0 blocks where it says `None`, as while it starts."""
    texts = series.labels.get("num_gpu_blocks", ""), series.labels.get("block_size", "")
    if not all(text.isascii() and text.isdigit() for text in texts):
        return 0, 16
    return _count(float(texts[0])), max(_count(float(texts[1])), 1)


def _count(value: float) -> int:
    return max(round(min(value, _MOST)), 0)
