"""The definition of every metric of `/metrics`.

The code records a metric under its `draftgate_*` name. A metric that vLLM or OpenTelemetry's GenAI
conventions define also appears under their names. vLLM's names serve existing dashboards,
benchmarks and schedulers.

To add a metric, define it here and call `Metrics.add`, `observe` or `set` where its value changes.
`docs/reference/metrics.md` is generated from these definitions.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Final

from draftgate.gateway.telemetry.metric_buckets import (
    DURATION_S,
    SHARES,
    TENANT_S,
    TPOT_S,
    TTFT_S,
)
from draftgate.gateway.telemetry.metric_form import DEFINED, Kind, define

METRICS: Final = DEFINED
"""All definitions, in the order of the page."""

_counter = partial(define, Kind.COUNTER)
_gauge = partial(define, Kind.GAUGE)
_histogram = partial(define, Kind.HISTOGRAM)


# --- requests -------------------------------------------------------------------------------------

REQUESTS: Final = _counter(
    "draftgate_requests", "Requests by endpoint and outcome", labels=("endpoint", "outcome")
)
ADAPTER_REQUESTS: Final = _counter(
    "draftgate_adapter_requests",
    "Requests with a LoRA adapter, by its name and by outcome",
    labels=("adapter", "outcome"),
)
CHOICES: Final = _counter(
    "draftgate_choices",
    "Choices that ended, by finish reason",
    "vllm:request_success",
    labels=("finish_reason",),
)
DURATION: Final = _histogram(
    "draftgate_request_duration_seconds",
    "Time from arrival to the last byte, by error type if the request failed",
    "vllm:e2e_request_latency_seconds",
    "gen_ai_server_request_duration_seconds",
    buckets=DURATION_S,
    labels=("operation", "error_type"),
)
TTFT: Final = _histogram(
    "draftgate_time_to_first_token_seconds",
    "Time from arrival to the first text",
    "vllm:time_to_first_token_seconds",
    "gen_ai_server_time_to_first_token_seconds",
    buckets=TTFT_S,
    labels=("operation",),
)
TPOT: Final = _histogram(
    "draftgate_time_per_output_token_seconds",
    "Mean time between the tokens of a request",
    "vllm:request_time_per_output_token_seconds",
    "gen_ai_server_time_per_output_token_seconds",
    buckets=TPOT_S,
    labels=("operation",),
)
GAPS: Final = _histogram(
    "draftgate_inter_token_latency_seconds",
    "Time between two deliveries of one or more tokens of a choice",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    buckets=TPOT_S,
)
WORKER_QUEUE: Final = _histogram(
    "draftgate_worker_queue_seconds", "Time a choice waits on its worker before its first step"
)
PREFILL: Final = _histogram(
    "draftgate_prefill_seconds",
    "Time from the first step of a choice to its first token",
    "vllm:request_prefill_time_seconds",
)
DECODE: Final = _histogram(
    "draftgate_decode_seconds",
    "Time from the first token of a choice to its last",
    "vllm:request_decode_time_seconds",
)

# --- tokens ---------------------------------------------------------------------------------------

PROMPT_TOKENS: Final = _counter(
    "draftgate_prompt_tokens", "Prompt tokens", "vllm:prompt_tokens", "vllm:prefix_cache_queries"
)
CACHED_TOKENS: Final = _counter(
    "draftgate_cached_prompt_tokens",
    "Prompt tokens whose KV was cached",
    "vllm:prefix_cache_hits",
    unit="tokens",
)
GENERATION_TOKENS: Final = _counter(
    "draftgate_generation_tokens", "Generated tokens", "vllm:generation_tokens"
)
PROMPT_LENGTH: Final = _histogram(
    "draftgate_request_prompt_tokens", "Tokens per prompt", "vllm:request_prompt_tokens"
)
OUTPUT_LENGTH: Final = _histogram(
    "draftgate_request_generation_tokens",
    "Generated tokens per request, summed over its choices",
    "vllm:request_generation_tokens",
)
MAX_TOKENS: Final = _histogram(
    "draftgate_request_max_tokens", "Maximum tokens per choice", "vllm:request_params_max_tokens"
)

# --- admission, queue, failover -------------------------------------------------------------------

REFUSED: Final = _counter(
    "draftgate_refused_requests", "Requests rejected with status 429, by reason", labels=("kind",)
)
FLOWS: Final = _counter(
    "draftgate_flows",
    "Flows by outcome: `met` and `missed` their deadline, or `refused` at the first request",
    labels=("outcome",),
)
FLOW_REQUESTS: Final = _counter(
    "draftgate_flow_requests",
    "Requests that name a flow, by their number in the flow (`none` without a known flow)",
    labels=("hop",),
)
FLOW_HOP_SHARE: Final = _histogram(
    "draftgate_flow_hop_deadline_ratio",
    "Time of a request from arrival to end as a share of its flow's deadline, by its number",
    buckets=SHARES,
    labels=("hop",),
)
QUEUED: Final = _gauge(
    "draftgate_queued_requests", "Prompts in the gateway's queue for a worker", unit="prompts"
)
WAITING: Final = _gauge(
    "draftgate_waiting_requests",
    "Prompts in the gateway's queue plus sequences in the queues of its workers",
    "vllm:num_requests_waiting",
)
TO_WORKER: Final = _histogram(
    "draftgate_time_to_worker_seconds",
    "Time from arrival to dispatch to a worker, including the queue",
    "vllm:request_queue_time_seconds",
)
RESUMES: Final = _counter(
    "draftgate_resumes",
    "Prompts that lost their worker, by cause and outcome",
    labels=("cause", "outcome"),
)
KV_FETCHES: Final = _counter(
    "draftgate_kv_fetches",
    "Decisions whether to fetch the KV blocks of a prefix, by its cause, by the reason of the "
    "decision, and by the end of the transfer",
    labels=("cause", "reason", "end"),
)
KV_FETCHED: Final = _counter(
    "draftgate_kv_fetched_bytes", "Bytes of KV blocks that workers took from other workers"
)
MOVES: Final = _counter(
    "draftgate_moves",
    "Attempts to move a running prompt to another worker, by reason and end",
    labels=("reason", "end"),
)
MOVE_GAP: Final = _histogram(
    "draftgate_move_gap_seconds",
    "Time from the last token of a moved prompt on its old worker to its next token",
)
RETRIES: Final = _counter(
    "draftgate_upstream_retries",
    "Failed, refused or lost upstream requests, by cause and by the decision of the retry budget",
    unit="requests",
    labels=("cause", "outcome"),
)
PREDICTED_CACHED_TOKENS: Final = _counter(
    "draftgate_predicted_cached_tokens", "Prompt tokens that upstreams had cached by their events"
)
FALLBACKS: Final = _counter(
    "draftgate_upstream_fallbacks",
    "Requests that another model of their chain got, by the two models and the reason",
    unit="requests",
    labels=("requested", "used", "reason"),
)
PREFILLS: Final = _counter(
    "draftgate_upstream_prefills",
    "Prompts for upstreams with roles, by what became of them (computed, failed, direct)",
    labels=("outcome",),
)
PREFILL_CALLS: Final = _histogram(
    "draftgate_upstream_prefill_seconds",
    "Time in which an upstream computed a prompt for the upstream of the output",
)
COST: Final = _counter(
    "draftgate_cost_usd",
    "Cost of responses by the prices of upstreams or models, by tenant (empty without API keys) and"
    " by model, which is the name at the upstream if the price is that of an upstream",
    labels=("tenant", "model"),
)
UNKNOWN_COSTS: Final = _counter(
    "draftgate_unknown_cost_requests",
    "Requests whose upstream has a price but reported no usage, so that the cost is unknown",
    labels=("tenant", "model"),
)
BUDGET_SPENT: Final = _gauge(
    "draftgate_budget_spent_usd", "Spending of a key or team with a budget", labels=("owner",)
)
PREEMPTIONS: Final = _counter(
    "draftgate_upstream_preemptions",
    "Requests that lost their place at an upstream to a request of a higher class, by what is left "
    "of them: the whole request, or the rest of a stream",
    unit="requests",
    labels=("outcome",),
)
TENANT_TOKENS: Final = _counter(
    "draftgate_tenant_tokens", "Prompt and output tokens by tenant", labels=("tenant",)
)
TENANT_QUEUED: Final = _gauge(
    "draftgate_tenant_queued_requests",
    "Prompts in the gateway's queue, by tenant (empty without API keys) and priority class",
    unit="prompts",
    labels=("tenant", "priority"),
)
QUOTA: Final = _gauge(
    "draftgate_tenant_quota_per_minute",
    "The quota of a tenant per minute, by what it limits (requests, tokens)",
    unit="units",
    labels=("tenant", "limit"),
    shared=True,
)
QUOTA_REMAINING: Final = _gauge(
    "draftgate_tenant_quota_remaining",
    "What a tenant may use now of its quota, by what it limits (requests, tokens)",
    unit="units",
    labels=("tenant", "limit"),
    shared=True,
)
TENANT_TTFT: Final = _histogram(
    "draftgate_tenant_time_to_first_token_seconds",
    "Time from arrival to the first text, by tenant",
    buckets=TENANT_S,
    labels=("tenant",),
)
TENANT_DURATION: Final = _histogram(
    "draftgate_tenant_request_duration_seconds",
    "Time from arrival to the last byte of finished requests, by tenant",
    buckets=TENANT_S,
    labels=("tenant",),
)
TENANT_REFUSED: Final = _counter(
    "draftgate_tenant_refused_requests",
    "Requests rejected with status 429, by tenant and reason",
    labels=("tenant", "kind"),
)
TENANT_SLO: Final = _counter(
    "draftgate_tenant_slo_requests",
    "Finished and failed requests with latency targets, by tenant and whether they met the targets",
    labels=("tenant", "outcome"),
)
HANDOVERS: Final = _counter(
    "draftgate_http_handovers",
    "Requests of the endpoints with most traffic that take the slower way through aiohttp, by why",
    labels=("reason",),
)
SLOW_READERS: Final = _gauge(
    "draftgate_slow_readers",
    "Streams whose client takes less than its worker generates",
    unit="streams",
)
CLIENT_PATHS: Final = _gauge(
    "draftgate_client_paths",
    "Open streams by the state of the path to their client",
    unit="streams",
    labels=("state",),
)

# --- speculation ----------------------------------------------------------------------------------

DECISIONS: Final = _counter(
    "draftgate_decisions",
    "Requests by speculation policy and chosen proposer",
    unit="requests",
    labels=("policy", "proposer"),
)
SPEC_STEPS: Final = _counter(
    "draftgate_spec_steps", "Drafts verified", "vllm:spec_decode_num_drafts", unit="drafts"
)
DRAFTED: Final = _counter(
    "draftgate_drafted_tokens", "Draft tokens verified", "vllm:spec_decode_num_draft_tokens"
)
ACCEPTED: Final = _counter(
    "draftgate_accepted_tokens", "Draft tokens accepted", "vllm:spec_decode_num_accepted_tokens"
)
DRAFT_TIME: Final = _counter(
    "draftgate_draft_seconds",
    "Time that drafts saved or lost for requests, by tenant (empty without API keys)",
    labels=("tenant", "outcome"),
)
ACCEPTED_AT: Final = _counter(
    "draftgate_accepted_tokens_per_pos",
    "Draft tokens accepted, by position",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    unit="tokens",
    labels=("position",),
)

# --- workers, read from their loads on each scrape ------------------------------------------------

for _name, _text, _of_worker, *_aliases in (
    (
        "draftgate_running_sequences",
        "Sequences in the batch",
        attrgetter("running"),
        "vllm:num_requests_running",
    ),
    ("draftgate_waiting_sequences", "Sequences in the worker's queue", attrgetter("waiting")),
    (
        "draftgate_adapter_waiting_sequences",
        "Sequences in the worker's queue that wait for their LoRA adapters",
        attrgetter("adapter_waiting"),
    ),
    (
        "draftgate_others_sequences",
        "Running and waiting sequences of an upstream that belong to other clients",
        attrgetter("others"),
    ),
    (
        "draftgate_upstream_metrics_age_seconds",
        "Age of an upstream's metrics (0 for other workers and before the first read)",
        lambda load: load.age_s or 0.0,
    ),
    (
        "draftgate_upstream_cached_blocks",
        "Blocks in the KV cache of an upstream, by its events (0 without current events)",
        attrgetter("cached_blocks"),
    ),
    (
        "draftgate_paused_sequences",
        "Sequences paused because their client stopped reading",
        attrgetter("paused"),
    ),
    (
        "draftgate_kv_cache_usage_ratio",
        "Share of KV blocks in use, 0 to 1 (0 if unknown)",
        attrgetter("kv_usage"),
        "vllm:kv_cache_usage_perc",
    ),
    (
        "draftgate_price_tokens",
        "Price of a draft slot, which is the survival that makes it worth verifying",
        attrgetter("price"),
    ),
    (
        "draftgate_acceptance_ratio",
        "Running share of draft tokens that are accepted, 0 to 1",
        attrgetter("acceptance"),
    ),
    (
        "draftgate_step_cost_error_ratio",
        "Running median of |measured / predicted - 1| over step times",
        attrgetter("step_cost_error"),
    ),
):
    _gauge(_name, _text, *_aliases, of_worker=_of_worker)

# --- the node -------------------------------------------------------------------------------------

STORE_OUT: Final = _gauge(
    "draftgate_state_store_out",
    "1 while the state store is unavailable and this node uses its own state, else 0",
    unit="outages",
    shared=True,
)
WORKER_CLAIMS: Final = _gauge(
    "draftgate_worker_claims",
    "Waiting requests of this node that have claimed the next room of a worker",
)
EXPIRED_CLAIMS: Final = _counter(
    "draftgate_expired_worker_claims",
    "Claims on workers that expired without a renewal, by all nodes of the pool",
    shared=True,
)
QUOTA_RESERVATIONS: Final = _gauge(
    "draftgate_quota_reservations",
    "Requests of this node with an open reservation of a tenant's quota",
)
EMBEDDING_HITS: Final = _counter(
    "draftgate_embedding_cache_hits", "Texts whose embedding was cached", unit="texts"
)
EMBEDDING_MISSES: Final = _counter(
    "draftgate_embedding_cache_misses", "Texts whose embedding was not cached", unit="texts"
)
EMBEDDING_BYTES: Final = _gauge("draftgate_embedding_cache_bytes", "Bytes of the cached embeddings")
STORED_RESPONSES: Final = _gauge(
    "draftgate_stored_responses", "Responses in the store of `/v1/responses`", shared=True
)
STORED_BYTES: Final = _gauge(
    "draftgate_stored_response_bytes", "Bytes of the stored responses of the pool", shared=True
)
EVICTED_RESPONSES: Final = _counter(
    "draftgate_evicted_responses",
    "Stored responses that responses of this node displaced before their end",
)
OPEN_WORKERS: Final = _gauge(
    "draftgate_open_workers",
    "Workers to which this node may send requests, including workers of peers",
    shared=True,
)
DESIRED_WORKERS: Final = _gauge(
    "draftgate_desired_workers",
    "Workers that the pool should have, by this node's view (scale on the maximum over all nodes)",
    labels=("pool",),
    shared=True,
)
DESIRED_SERVERS: Final = _gauge(
    "draftgate_upstream_desired_servers",
    "Servers of a model that upstreams should have, by this node's view (scale on the maximum over "
    "all nodes)",
    labels=("model",),
    shared=True,
)
WAITING_BY_MODEL: Final = _gauge(
    "draftgate_upstream_waiting_requests",
    "Requests that wait at this node for an upstream, by the model",
    labels=("model",),
)
TASKS: Final = _gauge(
    "draftgate_event_loop_tasks", "Tasks of the event loop, with one per request's connection"
)
BUILD: Final = _gauge(
    "draftgate_build_info",
    "Always 1, with the version as a label",
    labels=("version", "python"),
    shared=True,
)
