"""The metrics page of an engine: the names that each engine uses, and a parser.

The names are from the sources of the engines (2026-11-22):

    vLLM       vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py (V1 up to 0.9 called
               kv_cache_usage_perc gpu_cache_usage_perc). Counters end with _total on the page. The
               counters of drafts exist if and only if the engine speculates.
    SGLang     python/sglang/srt/observability/metrics_collector.py (before: srt/metrics/
               collector.py). All gauges always exist. Means are those of the last interval of
               decoding, about 40 steps.
    llama.cpp  tools/server/server-task.cpp of the source in llama-cpp-python 0.3.36, and a page of
               the server built from it. The counters of drafts always exist. Older versions have
               `llamacpp:kv_cache_usage_ratio`, which is ignored because it includes the caches of
               idle slots, which a new request would evict.
    Draftgate  gateway/telemetry/metric_definitions.py. The page shows vLLM's names too, so its own
               names are first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Final, NamedTuple, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from draftgate.policies.speculation.upstream_speculation import DraftMeans

_Names: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Dialect:
    """The metric names of one engine.

    If a field has several alternatives, the first available metric counts.

    Attributes:
        running: gauge of running sequences, which identifies the engine.
        waiting: gauge of queued sequences.
        max_sequences: gauge of the maximum number of concurrent sequences.
        kv_usage: gauge of the share of KV memory in use.
        kv_tokens: gauge of the tokens that KV memory holds.
        kv_info: gauge whose labels `num_gpu_blocks` and `block_size` give the size of KV memory.
        draft_counters: counters (not alternatives) of drafts, of their tokens, and of accepted
            tokens.
        draft_gauges: gauges (not alternatives) of the mean accepted length, the share of accepted
            tokens and the draft length. Lengths include the token that needs no draft.
        price, acceptance: gauges of a Draftgate's own metrics.
        counters_imply_drafts: whether `draft_counters` exist only if the engine speculates.
    """

    engine: str
    running: _Names
    waiting: _Names
    max_sequences: _Names = ()
    kv_usage: _Names = ()
    kv_tokens: _Names = ()
    kv_info: _Names = ()
    draft_counters: _Names = ()
    draft_gauges: _Names = ()
    price: _Names = ()
    acceptance: _Names = ()
    counters_imply_drafts: bool = False


_DIALECTS: Final = (
    _Dialect(
        "draftgate",
        running=("draftgate_running_sequences",),
        waiting=("draftgate_waiting_requests",),
        draft_counters=(
            "draftgate_spec_steps_total",
            "draftgate_drafted_tokens_total",
            "draftgate_accepted_tokens_total",
        ),
        price=("draftgate_price_tokens",),
        acceptance=("draftgate_acceptance_ratio",),
    ),
    _Dialect(
        "vllm",
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        kv_info=("vllm:cache_config_info",),
        draft_counters=(
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        ),
        counters_imply_drafts=True,
    ),
    _Dialect(
        "sglang",
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        max_sequences=("sglang:max_running_requests",),
        kv_usage=("sglang:token_usage",),
        kv_tokens=("sglang:max_total_num_tokens",),
        draft_gauges=(
            "sglang:spec_accept_length",
            "sglang:spec_accept_rate",
            "sglang:spec_num_draft_tokens",
        ),
    ),
    _Dialect(
        "llama.cpp",
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        draft_counters=(
            "llamacpp:spec_decode_num_drafts_total",
            "llamacpp:spec_decode_num_draft_tokens_total",
            "llamacpp:spec_decode_num_accepted_tokens_total",
        ),
    ),
)

_NAMES: Final = frozenset(
    name
    for dialect in _DIALECTS
    for names in astuple(dialect)
    if isinstance(names, tuple)
    for name in names
)

_RANKS: Final = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "ep_rank", "attn_tp_rank", "pid"})
"""Labels of processes that work on the same requests and report the same values."""

_MOST: Final = float(1 << 40)
"""Maximum count, which fits any message. Larger counts are errors."""

_DEFAULT_BLOCK_TOKENS: Final = 16


class DraftCounters(NamedTuple):
    """The draft counters of an engine since its start.

    Attributes:
        drafts: number of verified drafts.
        drafted: number of their tokens.
        accepted: number of accepted tokens among these.
    """

    drafts: float
    drafted: float
    accepted: float


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The metrics that an engine reports.

    Attributes:
        engine: engine whose names the page uses, or empty for an unknown engine.
        running, waiting: sequences in the batch and queued for it, from all clients.
        max_sequences: maximum number of concurrent sequences, or 0 if unknown.
        kv_usage: share of the KV memory in use, 0 to 1, or None if unknown.
        kv_blocks: number of blocks of the KV memory, or 0 if unknown.
        kv_block_tokens: tokens per block.
        drafts: whether the engine reports that it speculates.
        counters: draft counters, or None if the engine reports means or nothing.
        means: means of the latest drafts, or None if the engine reports counters or nothing.
        price: price of a draft slot from a Draftgate, else None.
        acceptance: acceptance of a draft token from a Draftgate, else None.
    """

    engine: str = ""
    running: int = 0
    waiting: int = 0
    max_sequences: int = 0
    kv_usage: float | None = None
    kv_blocks: int = 0
    kv_block_tokens: int = _DEFAULT_BLOCK_TOKENS
    drafts: bool = False
    counters: DraftCounters | None = None
    means: DraftMeans | None = None
    price: float | None = None
    acceptance: float | None = None


def read_metrics(text: str) -> EngineMetrics | None:
    """Return the metrics of a page, or None if no known engine wrote it.

    Raises:
        ValueError: the text is not a metrics page.
    """
    samples = _Samples(text)
    for dialect in _DIALECTS:
        running = samples.total(dialect.running)
        if running is not None:
            return _read(dialect, samples, _count(running))
    return None


class _Samples:
    """The finite values of the samples on a page, by name.

    The name of a counter ends with `_total`.
    """

    def __init__(self, text: str) -> None:
        # A page has hundreds of other metrics, which are not parsed.
        lines = [line for line in text.splitlines() if _name_of(line) in _NAMES]
        self._of: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
        except (IndexError, KeyError) as error:  # errors of the parser on broken lines
            raise ValueError(f"not a metrics page: {error}") from error
        for family in families:
            for sample in family.samples:
                if math.isfinite(sample.value):
                    self._of.setdefault(sample.name, []).append((sample.labels, sample.value))

    def labels(self, names: _Names) -> list[Mapping[str, str]]:
        """Return the labels of the samples with these names."""
        return [labels for name in names for labels, _ in self._of.get(name, ())]

    def total(self, names: _Names) -> float | None:
        """Return the sum over replicas of the first of these metrics that is present."""
        values = self._by_replica(names)
        return sum(values) if values else None

    def mean(self, names: _Names) -> float | None:
        """Return the mean over replicas of the first of these metrics that is present."""
        values = self._by_replica(names)
        return sum(values) / len(values) if values else None

    def _by_replica(self, names: _Names) -> list[float]:
        """Return one value per replica.

        Ranks of one replica report the same value, which counts once. A total also counts once if
        the page has its parts by `priority` (SGLang reports both).
        """
        found: dict[frozenset[tuple[str, str]], float] = {}
        for labels, value in next(filter(None, map(self._of.get, names)), ()):
            if not labels.get("priority"):
                key = frozenset(item for item in labels.items() if item[0] not in _RANKS)
                found[key] = max(value, found.get(key, value))
        return list(found.values())


def _name_of(line: str) -> str:
    """Return the name of a line's sample, or `#` for a comment."""
    head = line.partition("{")[0] if "{" in line else line
    return head.split(maxsplit=1)[0] if head.strip() else ""


def _read(dialect: _Dialect, samples: _Samples, running: int) -> EngineMetrics:
    blocks, block_tokens = _kv_memory(dialect, samples)
    counters = _counters(dialect, samples)
    usage = samples.mean(dialect.kv_usage)
    return EngineMetrics(
        dialect.engine,
        running,
        _count(samples.total(dialect.waiting) or 0.0),
        _count(samples.total(dialect.max_sequences) or 0.0),
        None if usage is None else min(max(usage, 0.0), 1.0),
        blocks,
        block_tokens,
        drafts=counters is not None or bool(samples.mean(dialect.draft_gauges[:1])),
        counters=counters,
        means=_means(*map(samples.mean, ((name,) for name in dialect.draft_gauges))),
        price=samples.mean(dialect.price),
        acceptance=samples.mean(dialect.acceptance),
    )


def _counters(dialect: _Dialect, samples: _Samples) -> DraftCounters | None:
    """Return the draft counters, or None if the engine has not speculated."""
    found = [samples.total((name,)) for name in dialect.draft_counters]
    values = [value for value in found if value is not None and value >= 0.0]
    if len(values) < 3:
        return None
    counters = DraftCounters(*values)
    return counters if dialect.counters_imply_drafts or counters.drafts > 0 else None


def _means(
    accept_length: float | None = None,
    accept_rate: float | None = None,
    draft_length: float | None = None,
) -> DraftMeans | None:
    if not accept_length or accept_length < 1.0:
        return None
    accepted = accept_length - 1.0
    if draft_length is not None and draft_length > 1.0:
        return DraftMeans(max(draft_length - 1.0, accepted), accepted)
    # Older versions report the share of accepted tokens and no draft length.
    if accept_rate is None or not 0.0 < accept_rate <= 1.0 or not accepted:
        return None
    return DraftMeans(accepted / accept_rate, accepted)


def _kv_memory(dialect: _Dialect, samples: _Samples) -> tuple[int, int]:
    """Return the number of KV blocks, 0 if unknown, and the tokens of a block."""
    tokens = samples.total(dialect.kv_tokens)
    if tokens is not None:
        return _count(tokens), 1
    unknown, total, block_tokens = (0, _DEFAULT_BLOCK_TOKENS), 0, 0
    for labels in samples.labels(dialect.kv_info):
        texts = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if not all(text.isascii() and text.isdigit() for text in texts):
            return unknown  # `None`, while the engine starts
        blocks, size = (_count(float(text)) for text in texts)
        if not blocks:
            return unknown
        total, block_tokens = total + blocks, block_tokens or max(size, 1)
    return (total, block_tokens) if total else unknown


def _count(value: float) -> int:
    return max(round(min(value, _MOST)), 0)
