"""Every figure of `/metrics`, declared once, under our name and those dashboards know.

A figure is recorded under its `draftgate_*` name. It appears as well under vLLM's name, for
dashboards, benchmarks and schedulers made for that, and under OpenTelemetry's (GenAI semantic
conventions, `gen_ai.server.*`, spelt as Prometheus spells them), where those have one.

To add a figure, declare it here and say `metrics.add`, `observe` or `set` where it happens.
`docs/reference/metrics.md` is made from this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Final

from draftgate.policies.types import WorkerLoad


class Kind(StrEnum):
    """What a figure is, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class MetricDefinition:
    """One figure. All have the label `model_name`, besides their own.

    Attributes:
        name: without the `_total` that counters are shown with.
        unit: of its values.
        labels: whose values tell its series apart; each is bounded (`cardinality`).
        buckets: upper bounds of a histogram, ascending, without infinity.
        aliases: further names, without `_total` too.
        of_worker: how to read it from a worker's load; those have the label `worker`.
    """

    name: str
    kind: Kind
    text: str
    unit: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    aliases: tuple[str, ...] = ()
    of_worker: Callable[[WorkerLoad], float] | None = None


METRICS: Final[list[MetricDefinition]] = []
"""All of them, in the order of the page."""


def _counter(
    name: str, text: str, unit: str, *aliases: str, labels: tuple[str, ...] = ()
) -> MetricDefinition:
    return _declared(MetricDefinition(name, Kind.COUNTER, text, unit, labels, aliases=aliases))


def _histogram(
    name: str,
    text: str,
    buckets: tuple[float, ...],
    *aliases: str,
    unit: str = "seconds",
    labels: tuple[str, ...] = (),
) -> MetricDefinition:
    return _declared(MetricDefinition(name, Kind.HISTOGRAM, text, unit, labels, buckets, aliases))


def _gauge(
    name: str, text: str, unit: str, *aliases: str, labels: tuple[str, ...] = ()
) -> MetricDefinition:
    return _declared(MetricDefinition(name, Kind.GAUGE, text, unit, labels, aliases=aliases))


def _of_workers(
    name: str, text: str, unit: str, of_worker: Callable[[WorkerLoad], float], *aliases: str
) -> MetricDefinition:
    return _declared(
        MetricDefinition(
            name, Kind.GAUGE, text, unit, ("worker",), aliases=aliases, of_worker=of_worker
        )
    )


def _declared(figure: MetricDefinition) -> MetricDefinition:
    METRICS.append(figure)
    return figure


_TTFT_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
"""Those of the GenAI conventions, and more between and beyond."""

_TPOT_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
"""Those of the GenAI conventions, whose finest is 10 ms, and finer ones: SLOs lie between."""

_DURATION_S: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
)  # fmt: skip
"""Those of the GenAI conventions, and one beyond."""

_PHASE_S: Final = (0.001, 0.0025, 0.005, *_DURATION_S)

_LENGTHS: Final = (
    1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
    32768.0, 65536.0, 131072.0,
)  # fmt: skip


def _kv_usage(load: WorkerLoad) -> float:
    if not load.kv_blocks_total:  # an upstream that does not tell
        return 0.0
    return 1 - load.kv_blocks_free / load.kv_blocks_total


# --- requests -------------------------------------------------------------------------------------

REQUESTS: Final = _counter(
    "draftgate_requests",
    "Requests by endpoint and outcome",
    "requests",
    labels=("endpoint", "outcome"),
)
CHOICES: Final = _counter(
    "draftgate_choices",
    "Choices that ended, by finish reason",
    "choices",
    "vllm:request_success",
    labels=("finish_reason",),
)
DURATION: Final = _histogram(
    "draftgate_request_duration_seconds",
    "Arrival to last byte, by what went wrong if anything did",
    _DURATION_S,
    "vllm:e2e_request_latency_seconds",
    "gen_ai_server_request_duration_seconds",
    labels=("operation", "error_type"),
)
TTFT: Final = _histogram(
    "draftgate_time_to_first_token_seconds",
    "Arrival to first text",
    _TTFT_S,
    "vllm:time_to_first_token_seconds",
    "gen_ai_server_time_to_first_token_seconds",
    labels=("operation",),
)
TPOT: Final = _histogram(
    "draftgate_time_per_output_token_seconds",
    "Mean gap between tokens of a request",
    _TPOT_S,
    "vllm:request_time_per_output_token_seconds",
    "gen_ai_server_time_per_output_token_seconds",
    labels=("operation",),
)
GAPS: Final = _histogram(
    "draftgate_inter_token_latency_seconds",
    "Gap between two deliveries of a choice, each of which may be several tokens",
    _TPOT_S,
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
)
WORKER_QUEUE: Final = _histogram(
    "draftgate_worker_queue_seconds",
    "Wait of a choice on its worker, up to its first step",
    _PHASE_S,
)
PREFILL: Final = _histogram(
    "draftgate_prefill_seconds",
    "First step of a choice to its first token",
    _PHASE_S,
    "vllm:request_prefill_time_seconds",
)
DECODE: Final = _histogram(
    "draftgate_decode_seconds",
    "First token of a choice to its last",
    _PHASE_S,
    "vllm:request_decode_time_seconds",
)

# --- tokens ---------------------------------------------------------------------------------------

PROMPT_TOKENS: Final = _counter(
    "draftgate_prompt_tokens",
    "Tokens of prompts",
    "tokens",
    "vllm:prompt_tokens",
    "vllm:prefix_cache_queries",
)
CACHED_TOKENS: Final = _counter(
    "draftgate_cached_prompt_tokens",
    "Tokens of prompts whose KV was cached",
    "tokens",
    "vllm:prefix_cache_hits",
)
GENERATION_TOKENS: Final = _counter(
    "draftgate_generation_tokens", "Tokens generated", "tokens", "vllm:generation_tokens"
)
PROMPT_LENGTH: Final = _histogram(
    "draftgate_request_prompt_tokens",
    "Tokens of a prompt",
    _LENGTHS,
    "vllm:request_prompt_tokens",
    unit="tokens",
)
OUTPUT_LENGTH: Final = _histogram(
    "draftgate_request_generation_tokens",
    "Tokens generated for a request, all choices together",
    _LENGTHS,
    "vllm:request_generation_tokens",
    unit="tokens",
)
MAX_TOKENS: Final = _histogram(
    "draftgate_request_max_tokens",
    "Most tokens that a choice may have",
    _LENGTHS,
    "vllm:request_params_max_tokens",
    unit="tokens",
)

# --- speculation ----------------------------------------------------------------------------------

REFUSED: Final = _counter(
    "draftgate_refused_requests",
    "Requests told to come back later, by what stood against them",
    "requests",
    labels=("kind",),
)
QUEUED: Final = _gauge("draftgate_queued_requests", "Prompts that wait for a worker", "prompts")
WAITING: Final = _gauge(
    "draftgate_waiting_requests",
    "Prompts that wait for a worker, and sequences that wait on one",
    "requests",
    "vllm:num_requests_waiting",
)
TO_WORKER: Final = _histogram(
    "draftgate_time_to_worker_seconds",
    "Arrival to the worker, the queue included",
    _PHASE_S,
    "vllm:request_queue_time_seconds",
)
RESUMES: Final = _counter(
    "draftgate_resumes",
    "Prompts that lost their worker, by how, and by whether and where they went on",
    "resumes",
    labels=("cause", "outcome"),
)
RETRIES: Final = _counter(
    "draftgate_upstream_retries",
    "Requests that an upstream refused or failed and another could take, by whether they were sent "
    "once more within the retry budget",
    "requests",
    labels=("cause", "outcome"),
)
TENANT_TOKENS: Final = _counter(
    "draftgate_tenant_tokens",
    "Tokens of prompts and outputs by tenant",
    "tokens",
    labels=("tenant",),
)
SLOW_READERS: Final = _gauge(
    "draftgate_slow_readers", "Clients that have to be waited for", "streams"
)
DECISIONS: Final = _counter(
    "draftgate_decisions",
    "Requests by what they may draft with",
    "requests",
    labels=("policy", "proposer"),
)
SPEC_STEPS: Final = _counter(
    "draftgate_spec_steps", "Drafts verified", "drafts", "vllm:spec_decode_num_drafts"
)
DRAFTED: Final = _counter(
    "draftgate_drafted_tokens",
    "Draft tokens verified",
    "tokens",
    "vllm:spec_decode_num_draft_tokens",
)
ACCEPTED: Final = _counter(
    "draftgate_accepted_tokens",
    "Draft tokens accepted",
    "tokens",
    "vllm:spec_decode_num_accepted_tokens",
)
ACCEPTED_AT: Final = _counter(
    "draftgate_accepted_tokens_per_pos",
    "Draft tokens accepted, by position",
    "tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    labels=("position",),
)

# --- workers, read when asked ---------------------------------------------------------------------

_of_workers(
    "draftgate_running_sequences",
    "Sequences in the batch",
    "sequences",
    attrgetter("running"),
    "vllm:num_requests_running",
)
_of_workers(
    "draftgate_waiting_sequences",
    "Sequences in the worker's queue",
    "sequences",
    attrgetter("waiting"),
)
_of_workers(
    "draftgate_others_sequences",
    "Of these two, sequences that an upstream has from somebody else",
    "sequences",
    attrgetter("others"),
)
_of_workers(
    "draftgate_upstream_metrics_age_seconds",
    "Age of what an upstream's metrics told; 0 where nothing was told, or all is counted here",
    "seconds",
    lambda load: load.age_s or 0.0,
)
_of_workers(
    "draftgate_paused_sequences",
    "Sequences whose reader stands still",
    "sequences",
    attrgetter("paused"),
)
_of_workers(
    "draftgate_kv_cache_usage_ratio",
    "Share of KV blocks in use, 0 to 1; 0 where nobody knows",
    "ratio",
    _kv_usage,
    "vllm:kv_cache_usage_perc",
)
_of_workers(
    "draftgate_price_tokens",
    "Expected tokens a draft slot must promise",
    "tokens",
    attrgetter("price"),
)
_of_workers(
    "draftgate_acceptance_ratio",
    "Chance of a draft token, 0 to 1",
    "ratio",
    attrgetter("acceptance"),
)
_of_workers(
    "draftgate_step_cost_error_ratio",
    "Running median of |measured / predicted - 1| over step times",
    "ratio",
    attrgetter("step_cost_error"),
)

# --- the node -------------------------------------------------------------------------------------

STORE_OUT: Final = _gauge(
    "draftgate_state_store_out",
    "1 while the state store does not answer, so that decisions rest on what this node knows",
    "outages",
)
OPEN_WORKERS: Final = _gauge(
    "draftgate_open_workers",
    "Workers that the node may send requests to now, others' included",
    "workers",
)
TASKS: Final = _gauge(
    "draftgate_event_loop_tasks",
    "Tasks of the event loop: some, and one for each connection with a request",
    "tasks",
)
BUILD: Final = _gauge(
    "draftgate_build_info", "1, with the version as a label", "info", labels=("version", "python")
)
