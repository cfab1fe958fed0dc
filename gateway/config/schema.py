"""Every setting of a node: one struct, from which flags, environment variables and the file follow.

A field `max_num_seqs` is the flag `--max-num-seqs`, the variable `DRAFTGATE_MAX_NUM_SEQS` and the
key `max_num_seqs` of the YAML file; its annotation holds bounds and help.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from draftgate.backends.base import WorkerConfig
from draftgate.policies.resilience.failover import MOST_RESUMES
from draftgate.policies.resilience.retry_budget import LEAST_PER_S, RETRY_SHARE


def _meta(
    text: str,
    *,
    kind: str = "",
    choices: tuple[str, ...] = (),
    gateway: bool = False,
    secret: bool = False,
    gt: float | None = None,
    ge: float | None = None,
    le: float | None = None,
) -> Meta:
    """Describe a setting.

    Args:
        text: the help text.
        kind: what a text stands for: `bytes` takes 512MiB, `indices` takes 0,1, `list` takes texts
            with commas between them, or the flag again and again, and so does `urls`; `url` is the
            address of an HTTP server, `store` that of a state store; `pool`, `backend` and the
            kinds of policies are names.
        choices: the values there are, in lower case; empty means any.
        gateway: whether it concerns the server only, not the model: `generate` does without.
        secret: whether its value is never shown.
        gt: what the value must exceed; instead of `ge`.
        ge: least value.
        le: greatest value.
    """
    extra = {"kind": kind, "choices": choices, "gateway": gateway, "secret": secret}
    if gt is not None:
        return Meta(description=text, extra=extra, gt=gt, le=le)
    return Meta(description=text, extra=extra, ge=ge, le=le)


_OF_ONE_WORKER: Final = frozenset(
    {"device_index", "num_workers", "threads", "upstream", "upstream_speculates"}
)
"""Fields of a worker's configuration that depend on how many workers there are."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a node."""

    model: (
        Annotated[
            str,
            _meta("Checkpoint: a directory, or a name on the Hugging Face hub (default: shipped)"),
        ]
        | None
    ) = None
    host: Annotated[str, _meta("Address to listen on; 0.0.0.0 is all", gateway=True)] = "127.0.0.1"
    port: Annotated[
        int, _meta("Port to listen on; 0 picks a free one", gateway=True, ge=0, le=65535)
    ] = 8000
    backend: Annotated[
        str,
        _meta(
            "What runs requests: engine, sim, openai, peer, or one installed beside", kind="backend"
        ),
    ] = "engine"
    speculation: Annotated[
        str,
        _meta(
            "Speculation policy: auto, off, fixed:K, smartspec, adaptive_verification, ...",
            kind="speculation",
        ),
    ] = "auto"
    batching: Annotated[
        str,
        _meta(
            "Prompt tokens of a step: slack, fixed:TOKENS, prefill_first, decode_first, ...",
            kind="batching",
        ),
    ] = "slack"
    proposer: (
        Annotated[str, _meta("The only proposer to draft with (default: whatever is there)")] | None
    ) = None
    draft_model: (
        Annotated[
            str,
            _meta("Draft model: a directory or hub name (default: the shipped one's own, or none)"),
        ]
        | None
    ) = None
    draft_window_tokens: (
        Annotated[
            int,
            _meta(
                "Tokens back that each layer of the draft model looks (default: the model's)", ge=1
            ),
        ]
        | None
    ) = None
    ngram_corpus_tokens: Annotated[
        int,
        _meta("Tokens of finished requests that n-gram drafts of a tenant may look in", ge=0),
    ] = 0
    sparse_budget_tokens: Annotated[
        int, _meta("Tokens of a sequence that sparse self-speculation reads", ge=16)
    ] = 512
    sparse_sink_tokens: Annotated[int, _meta("Of these, the first ones of the sequence", ge=0)] = 16
    verify: Annotated[
        str,
        _meta(
            "How drafts are verified: coupled ties the text to the seed, rejection accepts more",
            choices=("coupled", "rejection"),
        ),
    ] = "coupled"
    exact: Annotated[
        bool, _meta("Promise the same bits for any batching, also where that costs time")
    ] = False
    dtype: Annotated[
        str,
        _meta(
            "Type of weights and activations",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    device: Annotated[
        str, _meta("What the engine computes on", choices=("auto", "cpu", "cuda"))
    ] = "auto"
    devices: Annotated[
        tuple[int, ...],
        _meta("Indices of the devices to use, such as 0,1: one worker each", kind="indices"),
    ] = (0,)
    max_model_len: (
        Annotated[int, _meta("Most tokens of prompt and output (default: the model's)", ge=1)]
        | None
    ) = None
    max_num_seqs: Annotated[int, _meta("Most sequences in a batch", ge=1)] = 64
    max_step_tokens: Annotated[int, _meta("Token budget of a step", ge=1)] = 512
    kv_bytes: (
        Annotated[
            int,
            _meta(
                "Memory of a worker's KV cache, such as 512MiB (default: what is free)",
                kind="bytes",
                ge=1,
            ),
        ]
        | None
    ) = None
    gpu_memory_utilization: Annotated[
        float,
        _meta("Share of a GPU's memory to use where --kv-bytes is not given", gt=0, le=1),
    ] = 0.9
    threads: (
        Annotated[
            int,
            _meta("Threads of each CPU worker (default: its share of the cores, 1 or more)", ge=1),
        ]
        | None
    ) = None
    own_process: Annotated[
        bool, _meta("Run the engine in a process of its own: for many open streams")
    ] = False
    profile: Annotated[str, _meta("Step costs of the simulator: a shipped name or a file")] = (
        "cpu-demo"
    )
    sim_service_ms: (
        Annotated[float, _meta("sim: constant service time of a request", ge=0)] | None
    ) = None
    sim_acceptance: Annotated[
        float, _meta("sim: chance that a draft token is accepted", ge=0, le=1)
    ] = 0.6
    upstream: Annotated[
        tuple[str, ...],
        _meta(
            "openai, peer: address of a server that runs requests; again for more",
            kind="urls",
            gateway=True,
        ),
    ] = ()
    upstream_api_key_env: (
        Annotated[
            str, _meta("openai: environment variable with the upstreams' API key", gateway=True)
        ]
        | None
    ) = None
    upstream_concurrency: Annotated[
        int,
        _meta(
            "openai: most requests an upstream runs at once (0: as its metrics tell)",
            ge=0,
            gateway=True,
        ),
    ] = 0
    upstream_speculates: Annotated[
        tuple[str, ...],
        _meta(
            "openai: the upstreams that draft for every request; again for more "
            "(default: as their metrics tell)",
            kind="urls",
            gateway=True,
        ),
    ] = ()
    upstream_retry_share: Annotated[
        float,
        _meta(
            "openai: requests that may be sent again, as a share of those of the last 10 s",
            ge=0,
            le=1,
            gateway=True,
        ),
    ] = RETRY_SHARE
    upstream_retries_per_s: Annotated[
        float,
        _meta("openai: requests a second that may be sent again besides", ge=0, gateway=True),
    ] = LEAST_PER_S
    peer_secret_env: (
        Annotated[
            str,
            _meta(
                "Environment variable with the secret that the nodes of a cluster share "
                "(default: only this machine's nodes are peers)",
                gateway=True,
            ),
        ]
        | None
    ) = None
    decisions_file: (
        Annotated[str, _meta("Append every decision about speculation to this file, as JSON lines")]
        | None
    ) = None
    served_model_name: (
        Annotated[str, _meta("Name clients use (default: the model's own)", gateway=True)] | None
    ) = None
    ordering: Annotated[
        str,
        _meta("Who is next in the queue: fair, edf, fcfs, ...", kind="ordering", gateway=True),
    ] = "fair"
    admission: Annotated[
        str,
        _meta(
            "Who may wait: deadline refuses what would come too late, bounded, none, ...",
            kind="admission",
            gateway=True,
        ),
    ] = "deadline"
    routing: Annotated[
        str,
        _meta(
            "Which worker a request goes to: least_cost, least_loaded, prefix_affinity, "
            "power_of_two, round_robin, weighted:prefix=2,load=1, ...",
            kind="routing",
            gateway=True,
        ),
    ] = "least_cost"
    max_queued: Annotated[int, _meta("Most prompts that wait for a worker", gateway=True, ge=0)] = (
        1024
    )
    queue_timeout_s: Annotated[
        float, _meta("Longest that a request may wait for a worker", gateway=True, gt=0)
    ] = 60.0
    shed_priority: (
        Annotated[
            int,
            _meta(
                "Requests of this priority or behind are refused as soon as others wait",
                gateway=True,
            ),
        ]
        | None
    ) = None
    max_resumes: Annotated[
        int,
        _meta(
            "How often a request whose worker is lost may go on with another one",
            gateway=True,
            ge=0,
        ),
    ] = MOST_RESUMES
    api_keys_file: (
        Annotated[str, _meta("YAML file of API keys with their limits", gateway=True)] | None
    ) = None
    api_keys: Annotated[
        tuple[str, ...],
        _meta(
            "Keys without limits; rather in the environment", kind="list", gateway=True, secret=True
        ),
    ] = ()
    join: (
        Annotated[
            str,
            _meta(
                "Share load and leases through this Redis: redis://HOST:6379, rediss://, "
                "redis+sentinel://HOST:26379/SERVICE or redis+cluster:// (default: alone); "
                "its password is never shown",
                kind="store",
                gateway=True,
            ),
        ]
        | None
    ) = None
    pool: Annotated[
        str,
        _meta(
            "Name of the pool in that Redis; nodes of one pool are one cluster",
            kind="pool",
            gateway=True,
        ),
    ] = "default"
    no_worker: Annotated[
        bool, _meta("Be a gateway only, for the workers of the pool", gateway=True)
    ] = False
    advertise: (
        Annotated[
            str,
            _meta(
                "Where other nodes reach this one, such as http://10.0.0.5:8000 (default: where it "
                "listens)",
                kind="url",
                gateway=True,
            ),
        ]
        | None
    ) = None
    drain_timeout_s: Annotated[
        float, _meta("Seconds open streams may take to end on SIGTERM", gateway=True, ge=0)
    ] = 30.0
    max_body_bytes: Annotated[
        int, _meta("Largest request body, such as 8MiB", kind="bytes", gateway=True, ge=1)
    ] = 8 << 20
    log_level: Annotated[
        str,
        _meta("Least severity to log", choices=("debug", "info", "warning", "error"), gateway=True),
    ] = "info"
    log_format: Annotated[
        str,
        _meta("Form of a log line: key=value, or JSON", choices=("line", "json"), gateway=True),
    ] = "line"
    otlp_endpoint: (
        Annotated[
            str,
            _meta(
                "Send a trace of each request to this OTLP/HTTP collector, such as "
                "http://127.0.0.1:4318 (default: OTEL_EXPORTER_OTLP_ENDPOINT, or no traces)",
                kind="url",
                gateway=True,
            ),
        ]
        | None
    ) = None

    def worker_configs(self) -> tuple[WorkerConfig, ...]:
        """Return what concerns its own workers: a configuration for each upstream, or device.

        Raises:
            ValueError: an upstream is said to speculate that is none.
        """
        shared = {
            field.name: getattr(self, field.name)
            for field in fields(WorkerConfig)
            if field.name not in _OF_ONE_WORKER
        }
        strangers = [url for url in self.upstream_speculates if url not in self.upstream]
        if strangers:
            raise ValueError(f"--upstream-speculates: {strangers[0]} is no --upstream")
        if self.no_worker:
            return ()
        if self.upstream:
            return tuple(self._upstream_config(url, shared) for url in self.upstream)
        return tuple(
            WorkerConfig(
                **shared,
                device_index=device,
                num_workers=len(self.devices),
                threads=self._threads(),
            )
            for device in self.devices
        )

    def _upstream_config(self, url: str, shared: dict[str, Any]) -> WorkerConfig:
        """Return the configuration of one upstream; which of them speculate is said of all."""
        speculates = url in self.upstream_speculates if self.upstream_speculates else None
        return WorkerConfig(**shared, upstream=url, upstream_speculates=speculates)

    def _threads(self) -> int | None:
        """Return the threads of a worker: those asked for, or its share of the cores."""
        if self.threads is not None or len(self.devices) == 1:
            return self.threads
        return max(1, _usable_cores() // len(self.devices))


def _usable_cores() -> int:
    """Return how many cores this process may run on, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
