"""Every setting of a node: one struct, from which flags, environment variables and the file follow.

The field `max_num_seqs` is the flag `--max-num-seqs`, the variable `DRAFTGATE_MAX_NUM_SEQS` and the
key `max_num_seqs` of the YAML file. Its annotation holds bounds and help. The settings of workers
are inherited from `backends.worker_config`.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

from draftgate.backends.worker_config import (
    BATCHING,
    CLUSTER,
    DEVICES,
    MODEL,
    SIMULATOR,
    SPECULATION,
    UPSTREAMS,
    WorkerConfig,
    WorkerSettings,
    setting,
)
from draftgate.policies.resilience.failover import MOST_RESUMES
from draftgate.policies.resilience.retry_budget import LEAST_PER_S, RETRY_SHARE

QUEUE: Final = "Queueing and routing"
HTTP: Final = "HTTP and limits"
OBSERVABILITY: Final = "Observability"

MODEL_PANELS: Final = (MODEL, SPECULATION, BATCHING, DEVICES, SIMULATOR)
"""The panels of settings that `draftgate generate` takes too; all others concern the server."""

PANELS: Final = (
    *(MODEL, HTTP, SPECULATION, BATCHING, QUEUE, DEVICES, CLUSTER, UPSTREAMS, OBSERVABILITY),
    SIMULATOR,
)
"""All panels, in the order of help pages."""


class ServeConfig(WorkerSettings, frozen=True, kw_only=True):
    """Every setting of a node."""

    backend: Annotated[
        str,
        setting(
            "What runs requests: engine, sim, openai, peer, or an installed plugin.",
            MODEL,
            kind="backend",
        ),
    ] = "engine"
    served_model_name: (
        Annotated[str, setting("Model name for clients (default: the model's own).", HTTP)] | None
    ) = None
    devices: Annotated[
        tuple[int, ...],
        setting("Indices of devices, such as 0,1; each runs a worker.", DEVICES, kind="indices"),
    ] = (0,)
    decisions_file: (
        Annotated[
            str, setting("Append each speculation decision to this JSON lines file.", SPECULATION)
        ]
        | None
    ) = None
    ordering: Annotated[
        str,
        setting(
            "Ordering policy, which picks the next queued request: fair, edf, fcfs, ...",
            QUEUE,
            kind="ordering",
        ),
    ] = "fair"
    admission: Annotated[
        str,
        setting(
            "Admission policy: deadline rejects requests that would finish late; "
            "also bounded, none, ...",
            QUEUE,
            kind="admission",
        ),
    ] = "deadline"
    routing: Annotated[
        str,
        setting(
            "Routing policy, which picks the worker: least_cost, least_loaded, prefix_affinity, "
            "power_of_two, round_robin, weighted:prefix=2,load=1, ...",
            QUEUE,
            kind="routing",
        ),
    ] = "least_cost"
    max_queued: Annotated[int, setting("Maximum queued prompts.", QUEUE, ge=0)] = 1024
    queue_timeout_s: Annotated[
        float, setting("Maximum time that a request may queue, in seconds.", QUEUE, gt=0)
    ] = 60.0
    shed_priority: (
        Annotated[
            int,
            setting(
                "Reject requests with this priority or a higher number whenever others are queued.",
                QUEUE,
            ),
        ]
        | None
    ) = None
    max_resumes: Annotated[
        int,
        setting(
            "How often a request whose worker is lost may continue on another one.", QUEUE, ge=0
        ),
    ] = MOST_RESUMES
    upstream: Annotated[
        tuple[str, ...],
        setting(
            "Address of a server that runs requests, for the backends openai and peer; repeatable.",
            UPSTREAMS,
            kind="urls",
        ),
    ] = ()
    upstream_speculates: Annotated[
        tuple[str, ...],
        setting(
            "An --upstream that drafts for every request; repeatable (default: as metrics say).",
            UPSTREAMS,
            kind="urls",
        ),
    ] = ()
    upstream_retry_share: Annotated[
        float,
        setting(
            "Retries allowed, as a share of the upstream requests of the last 10 s.",
            UPSTREAMS,
            ge=0,
            le=1,
        ),
    ] = RETRY_SHARE
    upstream_retries_per_s: Annotated[
        float,
        setting("Retries allowed per second in addition to that share.", UPSTREAMS, ge=0),
    ] = LEAST_PER_S
    join: (
        Annotated[
            str,
            setting(
                "Join the cluster of this Redis: redis://HOST:6379, rediss://, "
                "redis+sentinel://HOST:26379/SERVICE or redis+cluster:// (default: none).",
                CLUSTER,
                kind="store",
            ),
        ]
        | None
    ) = None
    pool: Annotated[
        str,
        setting(
            "Name of the pool in that Redis; nodes of one pool form a cluster.",
            CLUSTER,
            kind="pool",
        ),
    ] = "default"
    no_worker: Annotated[
        bool, setting("Run only a gateway for the workers of the pool.", CLUSTER)
    ] = False
    advertise: (
        Annotated[
            str,
            setting(
                "Address at which other nodes reach this one, such as http://10.0.0.5:8000 "
                "(default: where it listens).",
                CLUSTER,
                kind="url",
            ),
        ]
        | None
    ) = None
    host: Annotated[str, setting("Address to listen on; 0.0.0.0 is every interface.", HTTP)] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, setting("Port to listen on; 0 picks a free one.", HTTP, ge=0, le=65535)
    ] = 8000
    api_keys_file: (
        Annotated[str, setting("YAML file of API keys and their limits.", HTTP)] | None
    ) = None
    api_keys: Annotated[
        tuple[str, ...],
        setting(
            "API keys without limits; prefer the environment variable.",
            HTTP,
            kind="list",
            secret=True,
        ),
    ] = ()
    max_body_bytes: Annotated[
        int, setting("Largest request body, such as 8MiB.", HTTP, kind="bytes", ge=1)
    ] = 8 << 20
    drain_timeout_s: Annotated[
        float, setting("Seconds that open streams get to finish on SIGTERM.", HTTP, ge=0)
    ] = 30.0
    log_level: Annotated[
        str,
        setting(
            "Least severity to log.", OBSERVABILITY, choices=("debug", "info", "warning", "error")
        ),
    ] = "info"
    log_format: Annotated[
        str,
        setting(
            "Format of log lines: key=value pairs or JSON.",
            OBSERVABILITY,
            choices=("line", "json"),
        ),
    ] = "line"
    otlp_endpoint: (
        Annotated[
            str,
            setting(
                "Send a trace of each request to this OTLP/HTTP collector, such as "
                "http://127.0.0.1:4318 (default: OTEL_EXPORTER_OTLP_ENDPOINT, else none).",
                OBSERVABILITY,
                kind="url",
            ),
        ]
        | None
    ) = None

    def worker_configs(self) -> tuple[WorkerConfig, ...]:
        """Return the configurations of this node's workers, one per upstream or device.

        Raises:
            ValueError: `upstream_speculates` names a server that is not an upstream.
        """
        for url in self.upstream_speculates:
            if url not in self.upstream:
                raise ValueError(f"--upstream-speculates: {url} is not one of the --upstream URLs")
        if self.no_worker:
            return ()
        if self.upstream:
            named = self.upstream_speculates
            speculates = {url: url in named if named else None for url in self.upstream}
            return tuple(
                self._worker_config(upstream=url, upstream_speculates=speculates[url])
                for url in self.upstream
            )
        return tuple(
            self._worker_config(
                device_index=device, num_workers=len(self.devices), threads=self._threads()
            )
            for device in self.devices
        )

    def _worker_config(self, **own: Any) -> WorkerConfig:
        shared = {name: getattr(self, name) for name in WorkerSettings.__struct_fields__}
        return WorkerConfig(**{**shared, **own})

    def _threads(self) -> int | None:
        """Return the threads of a worker: the setting, or its share of the cores."""
        if self.threads is not None or len(self.devices) == 1:
            return self.threads
        return max(1, _usable_cores() // len(self.devices))


def _usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
