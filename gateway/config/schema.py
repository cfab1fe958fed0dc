"""Every setting of a node, declared in one struct.

The field `max_num_seqs`, for example, is the flag `--max-num-seqs`, the variable
`DRAFTGATE_MAX_NUM_SEQS` and the key `max_num_seqs` of the YAML file. The type of a field holds its
bounds, and its docstring is the help text. `ServeConfig` inherits the settings of workers from
`backends.worker_config`.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from draftgate.addresses import mask_url, split_credentials
from draftgate.backends.worker_config import (
    CONNECT_TIMEOUT_S,
    LONGEST_PAUSE_S,
    Amount,
    Count,
    Positive,
    Share,
    Size,
    UpstreamSettings,
    WorkerConfig,
    WorkerSettings,
    choices,
    kind,
)
from draftgate.policies.resilience.failover import MOST_PREEMPTIONS, MOST_RESUMES
from draftgate.policies.resilience.liveness import UPSTREAM_PATIENCE_S
from draftgate.policies.resilience.retry_budget import LEAST_PER_S, RETRY_SHARE
from draftgate.policies.types import Role

T = TypeVar("T")

MAX_REQUEST_TOKENS: Final = 2 << 20
"""The default of the setting. A request of 128 choices may have 16384 tokens in each, and a
batch of short prompts 2048 prompts."""


class ServeConfig(WorkerSettings, frozen=True, kw_only=True):
    """Every setting of a node."""

    backend: Annotated[str, kind("backend")] = "engine"
    """Backend that runs requests: engine, sim, openai, peer, or an installed plugin. It is openai
    for --upstream without a model."""

    devices: Annotated[tuple[int, ...], kind("indices")] = (0,)
    """Indices of devices, such as 0,1. Each device runs a worker. Repeatable."""

    models: Annotated[tuple[str, ...], kind("models")] = ()
    """Also serve this model on the same devices: a checkpoint, or NAME=CHECKPOINT with a name for
    clients. Repeatable."""

    embedders: Annotated[tuple[str, ...], kind("models")] = ()
    """Also serve this embedding model, as --model does, with little KV memory. Repeatable."""

    memory_shares: Annotated[tuple[str, ...], kind("shares")] = ()
    """Share of the KV memory for one of several models: NAME=SHARE (default: 0.05 for an embedder,
    and equal parts of the rest for the others). Repeatable."""

    decisions_file: str | None = None
    """Append each speculation decision to this JSON lines file."""

    ordering: Annotated[str, kind("ordering")] = "fair"
    """Ordering policy, which picks the next queued request: fair, edf, fcfs, ..."""

    admission: Annotated[str, kind("admission")] = "deadline"
    """Admission policy: deadline (rejects requests that would be late), bounded, none, ..."""

    routing: Annotated[str, kind("routing")] = "least_cost"
    """Routing policy, which picks the worker: least_cost, freeness, least_loaded, prefix_affinity,
    power_of_two, round_robin, weighted:prefix=2,load=1, ..."""

    rescheduling: Annotated[str, kind("rescheduling")] = "off"
    """Rescheduling policy, which moves running requests between workers: off, llumnix, least_time,
    ..."""

    phases: Annotated[str, kind("phases")] = "together"
    """Phases policy, which picks the workers for the prompt and the output of a request: together,
    apart, splitwise, auto, ..."""

    no_acceptance_cache: bool = False
    """Neither store counts of accepted drafts for later workers of the checkpoint on this machine,
    nor read them."""

    max_queued: Count = 1024
    """Maximum queued prompts."""

    queue_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Maximum time that a request may queue, in seconds."""

    shed_priority: int | None = None
    """Reject requests with this or a higher priority number while other requests are queued."""

    max_resumes: Count = MOST_RESUMES
    """Maximum number of times that a request may resume on another worker."""

    no_moves: bool = False
    """Let the streams of a worker that shuts down end there or resume later, instead of moving them
    with their KV blocks."""

    upstream: Annotated[tuple[UpstreamSettings, ...], kind("upstreams")] = ()
    """Server that runs requests for its models: URL or NAME=URL, such as fast=http://gpu-1:8000 or
    https://USER:PASSWORD@gpu-1. A file may give its models, aliases, key and headers, too.
    Repeatable."""

    upstream_speculates: Annotated[tuple[str, ...], kind("urls")] = ()
    """An --upstream that drafts for every request (default: read from its metrics). Repeatable."""

    upstream_api_key_env: Annotated[str, kind("variable")] | None = None
    """Environment variable that holds the API key of the upstreams."""

    upstream_max_pause_s: Annotated[float, Meta(gt=0)] = LONGEST_PAUSE_S
    """Maximum time for which an upstream gets no requests after a refusal (429, 503) or a failed
    probe, in seconds, whatever its Retry-After header says."""

    upstream_connect_timeout_s: Annotated[float, Meta(gt=0)] = CONNECT_TIMEOUT_S
    """Maximum time to open a connection to an upstream, in seconds."""

    upstream_first_byte_timeout_s: Amount = 0.0
    """Maximum time until an upstream sends the first byte of a stream, in seconds (0: no limit).
    Afterwards, another upstream gets the request. Must exceed the time of the longest prompt."""

    upstream_response_timeout_s: Amount = 0.0
    """Maximum time until an upstream sends a response that is not streamed, in seconds (0: no
    limit). Must exceed the time of the longest output."""

    upstream_concurrency: Count = 0
    """Maximum concurrent requests of an upstream (0: according to its metrics)."""

    upstream_preemptible: bool = False
    """Let a request of a higher priority class abort one of a lower class that an upstream runs, if
    no upstream has capacity. The aborted request is sent again, or continues later."""

    max_preemptions: Count = MOST_PREEMPTIONS
    """Maximum number of times that a request is aborted for others (upstream_preemptible)."""

    start_timeout_s: Amount = 0.0
    """Maximum time that a request waits for a server of its model to start if no upstream of the
    model responds, in seconds (0: it fails at once)."""

    scale_to_zero_s: Amount = 0.0
    """Time without requests after which the scaling advice for a model of upstreams is no server,
    in seconds (0: it is always at least one)."""

    upstream_retry_share: Share = RETRY_SHARE
    """Retries allowed, as a share of the upstream requests of the last 10 s."""

    upstream_retries_per_s: Amount = LEAST_PER_S
    """Retries allowed per second in addition to upstream_retry_share."""

    upstream_kept_bytes: Annotated[int, Meta(ge=0, extra={"kind": "bytes"})] = 1 << 20
    """Bytes of each stream that are kept, so that another upstream can continue it if its own one
    fails, such as 1MiB (0: none is continued)."""

    # A step of an 8B model with 256 prompt tokens takes 6 ms longer on an H100. A call of another
    # server and the transfer of the KV cache take about as long. (Estimated, 2026-11-30.)
    upstream_prefill_tokens: Positive = 256
    """Uncached prompt tokens from which an upstream with the role prefill computes the prompt of a
    request. The upstream of the output computes shorter ones itself."""

    upstream_stall_s: Annotated[float, Meta(gt=0)] = UPSTREAM_PATIENCE_S
    """Silence of an upstream within a stream after which another one continues it, in seconds."""

    fallbacks: Annotated[tuple[str, ...], kind("fallbacks")] = ()
    """Models that get the requests for a model in turn if none of its workers or upstreams can
    respond: MODEL=FALLBACK, such as large=small,other. Repeatable."""

    join: Annotated[str, kind("store")] | None = None
    """Join the cluster of this Redis: redis://HOST:6379, rediss://,
    redis+sentinel://HOST:26379/SERVICE or redis+cluster:// (default: none)."""

    pool: Annotated[str, kind("pool")] = "default"
    """Name of the pool in Redis. The nodes of one pool form a cluster."""

    no_worker: bool = False
    """Run only a gateway for the workers of the pool."""

    advertise: Annotated[str, kind("url")] | None = None
    """Address at which other nodes reach this node, such as http://10.0.0.5:8000 (default: its
    listen address)."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 means every interface."""

    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port to listen on (0 picks a free port)."""

    processes: Annotated[int, Meta(ge=1, le=256)] = 1
    """Number of processes that serve HTTP on the port, with the same workers. More than one use
    further cores if the gateway is the bottleneck."""

    allowed_hosts: Annotated[tuple[str, ...], kind("hosts")] = ()
    """Accept only this name in the Host header (default: any name, or loopback names if the node
    listens on a loopback address without API keys). Repeatable."""

    cors_origins: Annotated[tuple[str, ...], kind("origins")] = ()
    """Let web pages of this origin use the API, such as https://chat.example.com (default: none).
    Repeatable."""

    tls_certfile: str | None = None
    """Serve HTTPS with the certificate chain in this PEM file. The node loads the file again when
    it changes."""

    tls_keyfile: str | None = None
    """PEM file with the private key of the certificate (default: the certificate file)."""

    tls_client_ca_file: str | None = None
    """Require client certificates of the CAs in this PEM file. Probes and other nodes need none."""

    served_model_name: Annotated[tuple[str, ...], kind("list")] = ()
    """Model name for clients (default: the model's own). Repeatable, also as --served-model-name A
    B after MODEL. Responses and metrics have the first name."""

    no_tool_prompt: bool = False
    """Refuse tools for a model whose chat template has none in a known format, instead of
    describing them in the prompt."""

    api_keys_file: str | None = None
    """YAML file of API keys and their limits."""

    api_keys: Annotated[tuple[str, ...], kind("list", secret=True)] = ()
    """API key without limits. Prefer the environment variable. Repeatable."""

    metrics_keys: Annotated[tuple[str, ...], kind("list", secret=True)] = ()
    """Key that can only read /metrics. Prefer the environment variable. Repeatable."""

    strict: bool = False
    """Refuse files of API keys and certificates that other users may change, instead of warning."""

    max_body_bytes: Size = 8 << 20
    """Largest request body, such as 8MiB."""

    max_request_tokens: Count = MAX_REQUEST_TOKENS
    """Maximum tokens of all prompts and choices of a request together, with the alternatives of
    their log probabilities. One choice may always fill the context."""

    body_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Time that a client has to send the body of a request, in seconds."""

    keepalive_timeout_s: Annotated[float, Meta(gt=0)] = 75.0
    """Time after which a connection without the complete headers of its next request is closed, in
    seconds. Must exceed the idle timeout of a proxy in front of the node."""

    embedding_cache_bytes: Annotated[int, Meta(ge=0, extra={"kind": "bytes"})] = 64 << 20
    """Memory of each process for embeddings of earlier texts, such as 64MiB. 0 caches none."""

    response_store_bytes: Annotated[int, Meta(ge=0, extra={"kind": "bytes"})] = 64 << 20
    """Memory for stored responses of /v1/responses, such as 64MiB. The nodes of a pool share this
    memory in Redis. 0 stores no responses."""

    response_store_ttl_s: Annotated[float, Meta(gt=0)] = 86_400.0
    """Time for which a response is stored, in seconds."""

    files: str | None = None
    """Folder, or URL of fsspec such as s3://bucket/folder, for the files and batches of clients
    (default: none, so that /v1/files and /v1/batches are not offered)."""

    max_file_bytes: Size = 200 << 20
    """Largest file of a client, such as 200MiB."""

    max_batch_lines: Positive = 50_000
    """Maximum number of requests of a batch."""

    batch_concurrency: Positive = 32
    """Maximum number of requests of batches that a gateway process runs at a time."""

    drain_timeout_s: Amount = 30.0
    """Time that open streams have to finish after SIGTERM, in seconds."""

    log_level: Annotated[str, choices("debug", "info", "warning", "error")] = "info"
    """Minimum severity to log."""

    log_format: Annotated[str, choices("line", "json")] = "line"
    """Format of log lines: key=value pairs or JSON."""

    audit_file: str | None = None
    """Append refused requests and the use of API keys to this JSON lines file."""

    otlp_endpoint: Annotated[str, kind("collector")] | None = None
    """Send a trace of each request to this OTLP/HTTP collector, such as http://127.0.0.1:4318
    (default: OTEL_EXPORTER_OTLP_ENDPOINT, otherwise none)."""

    @property
    def first_name(self) -> str | None:
        """The name of the first model in responses, or None for its own."""
        return next(iter(self.served_model_name), None)

    @property
    def only_forwards(self) -> bool:
        """Whether all workers of the node are upstreams, and none is its own beside them."""
        return self.backend in {"openai", "peer"}

    @property
    def scheme(self) -> str:
        """The scheme of the node's address, `http` or `https`."""
        return "http" if self.tls_certfile is None else "https"

    def worker_configs(
        self, model_id: str | None = None, memory_share: float = 1.0
    ) -> tuple[WorkerConfig, ...]:
        """Return the configurations of this node's workers, one per upstream or device.

        Args:
            model_id, memory_share: as in `WorkerConfig`.

        Raises:
            ValueError: as in `upstreams`, or no worker could record acceptance or use adapters.
        """
        records = self.record_acceptance is not None
        for option, given in (("--record-acceptance", records), ("--lora", bool(self.loras))):
            if not given:
                continue
            if self.backend != "engine":
                raise ValueError(f"{option} needs --backend engine, not --backend {self.backend}")
            if self.no_worker:
                raise ValueError(f"{option} cannot be combined with --no-worker")
        peers = [one.url for one in self.upstream if self.backend == "peer"]
        if peers and any(one.role is not Role.ANY for one in self.upstream):
            raise ValueError("--backend peer: the node of an upstream sets its role with --role")
        shared = {"--upstream with --backend peer": peers}
        if self.advertise is not None:
            shared["--advertise"] = [self.advertise]
        for option, urls in shared.items():
            if any(split_credentials(url)[1] for url in urls):
                raise ValueError(f"{option} takes no credentials: set --peer-secret-env")
        if self.no_worker:
            return ()
        if self.upstream:
            return tuple(self._worker_config(upstream=one) for one in self.upstreams())
        return tuple(
            self._worker_config(
                device_index=device,
                num_workers=len(self.devices),
                threads=self._threads(),
                model_id=model_id,
                memory_share=memory_share,
            )
            for device in self.devices
        )

    def upstreams(self) -> tuple[UpstreamSettings, ...]:
        """Return the upstreams with their names and with the settings that all of them share.

        Raises:
            ValueError: two upstreams have one name, or `upstream_speculates` names a server that is
                not an upstream.
        """
        urls, speculating = [one.url for one in self.upstream], self.upstream_speculates
        for url in speculating:
            if url not in urls:
                raise ValueError(
                    f"--upstream-speculates: {mask_url(url)} is not one of the --upstream URLs"
                )
        found = tuple(
            replace(
                one,
                name=one.name or f"upstream-{number}",
                speculates=one.url in speculating if speculating else one.speculates,
                api_key_env=one.api_key_env or self.upstream_api_key_env,
                concurrency=_given(one.concurrency, self.upstream_concurrency),
                max_pause_s=_given(one.max_pause_s, self.upstream_max_pause_s),
                connect_timeout_s=_given(one.connect_timeout_s, self.upstream_connect_timeout_s),
                first_byte_timeout_s=_given(
                    one.first_byte_timeout_s, self.upstream_first_byte_timeout_s
                ),
                response_timeout_s=_given(one.response_timeout_s, self.upstream_response_timeout_s),
                preemptible=_given(one.preemptible, self.upstream_preemptible),
            )
            for number, one in enumerate(self.upstream, 1)
        )
        names = Counter(one.name for one in found)
        for name, count in names.items():
            if count > 1:
                raise ValueError(f"--upstream: two upstreams have the name {name!r}")
        return found

    def _worker_config(self, **own: Any) -> WorkerConfig:
        shared = {name: getattr(self, name) for name in WorkerSettings.__struct_fields__}
        cached = not self.no_acceptance_cache
        return WorkerConfig(**{**shared, **own, "acceptance_cache": cached})

    def _threads(self) -> int | None:
        """Return the threads of a worker: the setting, or its share of the cores."""
        if self.threads is not None or len(self.devices) == 1:
            return self.threads
        return max(1, _usable_cores() // len(self.devices))


def _given(own: T | None, shared: T) -> T:
    return shared if own is None else own


def _usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_PANELS: Final = {
    "Model": "model backend max_model_len generation_config dtype exact",
    "LoRA adapters": "loras max_loras",
    "Further models": "models embedders memory_shares",
    "HTTP and limits": "host port processes tls_certfile tls_keyfile tls_client_ca_file "
    "allowed_hosts cors_origins served_model_name no_tool_prompt api_keys_file api_keys "
    "metrics_keys strict max_body_bytes max_request_tokens body_timeout_s keepalive_timeout_s "
    "embedding_cache_bytes "
    "response_store_bytes response_store_ttl_s files max_file_bytes max_batch_lines "
    "batch_concurrency drain_timeout_s",
    "Speculation": "speculation proposer draft_model draft_window_tokens ngram_corpus_bytes "
    "sparse_budget_tokens sparse_sink_tokens verify no_acceptance_cache decisions_file",
    "Batching": "batching max_num_seqs max_step_tokens",
    "Queueing and routing": "ordering admission routing rescheduling phases max_queued "
    "queue_timeout_s shed_priority max_resumes no_moves",
    "Devices and memory": "device devices quantization kv_cache_dtype kv_bytes "
    "gpu_memory_utilization threads own_process",
    "Cluster": "join pool role no_worker advertise peer_secret_env",
    "Upstreams": "upstream upstream_speculates upstream_concurrency upstream_api_key_env "
    "upstream_max_pause_s upstream_preemptible max_preemptions "
    "start_timeout_s scale_to_zero_s "
    "upstream_connect_timeout_s upstream_first_byte_timeout_s upstream_response_timeout_s "
    "upstream_retry_share upstream_retries_per_s upstream_kept_bytes upstream_stall_s "
    "upstream_prefill_tokens fallbacks",
    "Observability": "log_level log_format audit_file otlp_endpoint record_acceptance "
    "record_acceptance_share record_acceptance_proposers record_acceptance_tenants "
    "record_acceptance_bytes",
    "Simulator": "profile sim_service_ms sim_acceptance",
}

PANELS: Final = {panel: tuple(names.split()) for panel, names in _PANELS.items()}
"""The settings under each heading of the help page, in display order."""

MODEL_PANELS: Final = frozenset(
    {"Model", "Speculation", "Batching", "Devices and memory", "Simulator"}
)
"""Panels of the settings that `draftgate chat` and `run` also accept. Others concern the server."""
