"""The settings of a worker: the base of a node's settings, which become flags and variables.

Each setting is declared once, here or in `gateway.config.schema`. Its annotation holds its bounds,
its help text and its panel in the help page. `gateway.config` reads the values.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


def setting(
    text: str,
    panel: str,
    *,
    kind: str = "",
    choices: tuple[str, ...] = (),
    secret: bool = False,
    gt: float | None = None,
    ge: float | None = None,
    le: float | None = None,
) -> Meta:
    """Describe a setting.

    Args:
        text: the help text, one sentence.
        panel: the heading of the help page under which it is listed.
        kind: how the value is read and checked, if its type does not say it. `bytes` takes 512MiB,
            `indices` takes 0,1, `list` and `urls` take several values; `url` and `store` are
            addresses; `pool`, `backend` and the kinds of policies are names.
        choices: the allowed values, in lower case; empty allows any.
        secret: whether its value is masked wherever settings are shown.
        gt: exclusive lower bound, instead of `ge`.
        ge: least value.
        le: greatest value.
    """
    extra = {"panel": panel, "kind": kind, "choices": choices, "secret": secret}
    if gt is not None:
        return Meta(description=text, extra=extra, gt=gt, le=le)
    return Meta(description=text, extra=extra, ge=ge, le=le)


MODEL = "Model"
SPECULATION = "Speculation"
BATCHING = "Batching"
DEVICES = "Devices and memory"
SIMULATOR = "Simulator"
UPSTREAMS = "Upstreams"
CLUSTER = "Cluster"


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all workers of a node share."""

    model: (
        Annotated[
            str,
            setting(
                "Checkpoint: a directory, or a name on the Hugging Face hub "
                "(default: the shipped model).",
                MODEL,
            ),
        ]
        | None
    ) = None
    max_model_len: (
        Annotated[
            int,
            setting(
                "Maximum tokens of a prompt and its output (default: the model's).", MODEL, ge=1
            ),
        ]
        | None
    ) = None
    dtype: Annotated[
        str,
        setting(
            "Data type of weights and activations.",
            MODEL,
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    exact: Annotated[
        bool,
        setting("Produce the same bits for any batch composition, even where it is slower.", MODEL),
    ] = False
    speculation: Annotated[
        str,
        setting(
            "Speculation policy: auto, off, fixed:K, smartspec, adaptive_verification, ...",
            SPECULATION,
            kind="speculation",
        ),
    ] = "auto"
    proposer: (
        Annotated[str, setting("Draft with this proposer only (default: any).", SPECULATION)] | None
    ) = None
    draft_model: (
        Annotated[
            str,
            setting(
                "Draft model with the model's vocabulary: a directory or a hub name "
                "(default: the shipped one for the shipped model, else none).",
                SPECULATION,
            ),
        ]
        | None
    ) = None
    draft_window_tokens: (
        Annotated[
            int,
            setting(
                "Attention window of each layer of the draft model, in tokens "
                "(default: the model's).",
                SPECULATION,
                ge=1,
            ),
        ]
        | None
    ) = None
    ngram_corpus_tokens: Annotated[
        int,
        setting(
            "Tokens of a tenant's finished requests that n-gram drafts may search.",
            SPECULATION,
            ge=0,
        ),
    ] = 0
    sparse_budget_tokens: Annotated[
        int,
        setting("Tokens of a sequence that sparse self-speculation reads.", SPECULATION, ge=16),
    ] = 512
    sparse_sink_tokens: Annotated[
        int,
        setting("How many of those tokens are the first ones of the sequence.", SPECULATION, ge=0),
    ] = 16
    verify: Annotated[
        str,
        setting(
            "Verification: coupled makes the text depend on the seed alone, "
            "rejection accepts more drafts.",
            SPECULATION,
            choices=("coupled", "rejection"),
        ),
    ] = "coupled"
    batching: Annotated[
        str,
        setting(
            "Batching policy, which sets the prompt tokens of a step: slack, fixed:TOKENS, "
            "prefill_first, decode_first, ...",
            BATCHING,
            kind="batching",
        ),
    ] = "slack"
    max_num_seqs: Annotated[int, setting("Maximum sequences in a batch.", BATCHING, ge=1)] = 64
    max_step_tokens: Annotated[
        int,
        setting("Token budget of a step: decodes, draft slots and prefill chunks.", BATCHING, ge=1),
    ] = 512
    device: Annotated[
        str, setting("Device of the engine.", DEVICES, choices=("auto", "cpu", "cuda"))
    ] = "auto"
    kv_bytes: (
        Annotated[
            int,
            setting(
                "Memory of a worker's KV cache, such as 512MiB (default: what is free).",
                DEVICES,
                kind="bytes",
                ge=1,
            ),
        ]
        | None
    ) = None
    gpu_memory_utilization: Annotated[
        float,
        setting(
            "Share of a GPU's memory that weights, activations and KV cache may use "
            "without --kv-bytes.",
            DEVICES,
            gt=0,
            le=1,
        ),
    ] = 0.9
    threads: (
        Annotated[
            int,
            setting(
                "Threads of each CPU worker (default: its share of the cores, at least 1).",
                DEVICES,
                ge=1,
            ),
        ]
        | None
    ) = None
    own_process: Annotated[
        bool,
        setting("Run the engine in its own process, which helps with many open streams.", DEVICES),
    ] = False
    profile: Annotated[
        str, setting("Step costs of the simulator: a shipped profile or a file.", SIMULATOR)
    ] = "cpu-demo"
    sim_service_ms: (
        Annotated[
            float,
            setting(
                "Constant service time of a simulated request, in place of a profile.",
                SIMULATOR,
                ge=0,
            ),
        ]
        | None
    ) = None
    sim_acceptance: Annotated[
        float,
        setting("Probability that the simulator accepts a draft token.", SIMULATOR, ge=0, le=1),
    ] = 0.6
    upstream_api_key_env: (
        Annotated[
            str,
            setting("Environment variable that holds the API key of the upstreams.", UPSTREAMS),
        ]
        | None
    ) = None
    upstream_concurrency: Annotated[
        int,
        setting(
            "Maximum requests that an upstream runs at once (0: as its metrics say).",
            UPSTREAMS,
            ge=0,
        ),
    ] = 0
    peer_secret_env: (
        Annotated[
            str,
            setting(
                "Environment variable that holds the secret of the cluster's nodes "
                "(default: only nodes on this machine are peers).",
                CLUSTER,
            ),
        ]
        | None
    ) = None


class WorkerConfig(WorkerSettings, frozen=True, kw_only=True):
    """The configuration of one worker.

    Attributes:
        device_index: which of the machine's devices it uses.
        num_workers: the workers of this process, including itself; on a CPU they share the memory.
        upstream: the server that runs its requests, for backends that forward them.
        upstream_speculates: whether the upstream drafts for every request; None asks its metrics.
    """

    device_index: int = 0
    num_workers: int = 1
    upstream: str | None = None
    upstream_speculates: bool | None = None
