"""The settings of workers, which are part of a node's settings.

Each setting is declared once, here or in `gateway.config.schema`. Its type holds its bounds, and
its docstring is the help text. `gateway.config` reads the values.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from draftgate.addresses import mask_url
from draftgate.policies.types import Role


def kind(name: str, *, secret: bool = False) -> Meta:
    """Annotate a setting that is read or checked in a special way.

    Args:
        name: kind of the setting. `fallbacks`, `hosts`, `indices`, `list`, `models`, `origins`,
            `shares`, `upstreams` and `urls` take several values. `url`, `collector` and `store` are
            addresses. `pool`, `backend`, `variable` and the kinds of policies are names.
        secret: whether the value is masked wherever settings are shown.
    """
    return Meta(extra={"kind": name, "secret": secret})


def choices(*allowed: str) -> Meta:
    """Annotate a setting that takes one of these values, in lower case."""
    return Meta(extra={"choices": allowed})


Count: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Amount: TypeAlias = Annotated[float, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Size: TypeAlias = Annotated[int, Meta(ge=1, extra={"kind": "bytes"})]
"""A size in bytes. A text may have a unit, as in 512MiB."""


class StepLimits(NamedTuple):
    """The largest step of a worker.

    Attributes:
        sequences: maximum number of sequences in a batch.
        tokens: token budget: decodes, draft slots and prefill chunks.
    """

    sequences: int
    tokens: int


STEP_LIMITS: Final = {"cpu": StepLimits(64, 512), "cuda": StepLimits(256, 2048)}
"""Default limits by type of device.

On a GPU these are vLLM's. A step of an 8B model reads its weights in about the time in which it
computes 184 rows (data sheet of an H200), so with 64 sequences a GPU would compute a third of what
it can (estimated, 2026-11-27). On a CPU a step of 512 tokens already delays other requests.
"""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all workers of a node share."""

    model: str | None = None
    """Model: a directory, a GGUF file, a name that draftgate list shows, or a name on the Hugging
    Face hub, as hf:ORG/REPO:Q4_K_M for a GGUF file (default: smollm2 if it has been pulled,
    otherwise the shipped model of Python code)."""

    max_model_len: Positive | None = None
    """Maximum number of tokens of a prompt and its output (default: the model's)."""

    generation_config: str = "auto"
    """Source of the sampling parameters that a request does not set: auto (generation_config.json
    of the checkpoint), none (the defaults of the API), or the path of another such file."""

    loras: Annotated[tuple[str, ...], kind("models")] = ()
    """Also serve the model with this LoRA adapter: a PEFT checkpoint of the first model, or
    NAME=CHECKPOINT with a name for clients. Repeatable."""

    # Eight adapters of rank 16 for all products of an 8B model take 0.7 GB in bfloat16, 4% of the
    # model. (Chosen by that reasoning, 2026-11-27.)
    max_loras: Positive = 8
    """Maximum number of LoRA adapters in memory. A request for another one waits until it replaces
    the least recently used one without requests."""

    dtype: Annotated[str, choices("auto", "float32", "bfloat16", "float16")] = "auto"
    """Data type of weights and activations."""

    quantization: Annotated[str, choices("auto", "none", "stored", "q8_0", "q4_0")] = "auto"
    """Packed weights on a CPU: stored (blocks of a GGUF file stay packed), none (all weights are
    unpacked), a block type to which the other weights are quantised (q8_0 or q4_0), or auto, which
    means stored, but none for smollm2."""

    kv_cache_dtype: Annotated[str, choices("auto", "fp8")] = "auto"
    """Data type of keys and values: auto (that of weights and activations), or fp8 (E4M3), which
    holds twice the tokens of bfloat16 and changes texts slightly."""

    exact: bool = False
    """Produce the same bits for any batch composition, even if this is slower."""

    speculation: Annotated[str, kind("speculation")] = "auto"
    """Speculation policy: auto, off, fixed:K, smartspec, adaptive_verification, ..."""

    proposer: str | None = None
    """Draft with this proposer only (default: any)."""

    draft_model: str | None = None
    """Draft model with the model's vocabulary, or EAGLE-3 head of the model: a directory or a hub
    name (default: the shipped draft model for the shipped model, otherwise none)."""

    draft_window_tokens: Positive | None = None
    """Attention window of each layer of the draft model or head, in tokens (default: its own)."""

    ngram_corpus_bytes: Annotated[int, Meta(ge=0, extra={"kind": "bytes"})] = 64 << 20
    """Memory for outputs of finished requests, which n-gram drafts of the same tenant and
    cache_salt may search, such as 64MiB (0: none)."""

    sparse_budget_tokens: Annotated[int, Meta(ge=16)] = 512
    """Tokens of a sequence that sparse self-speculation reads."""

    sparse_sink_tokens: Count = 16
    """Tokens at the start of a sequence that sparse self-speculation always reads."""

    verify: Annotated[str, choices("coupled", "rejection")] = "coupled"
    """Verification: coupled makes the text depend on the seed alone, rejection accepts more
    drafts."""

    batching: Annotated[str, kind("batching")] = "slack"
    """Batching policy, which sets the prompt tokens of a step: slack, fixed:TOKENS, prefill_first,
    decode_first, ..."""

    max_num_seqs: Positive | None = None
    """Maximum number of sequences in a batch (default: 64, or 256 on a GPU)."""

    max_step_tokens: Positive | None = None
    """Token budget of a step: decodes, draft slots and prefill chunks (default: 512, or 2,048 on a
    GPU)."""

    role: Annotated[str, choices("any", "prefill", "decode")] = "any"
    """Phase of requests that the workers prefer, for --phases: any, prefill, decode."""

    device: Annotated[str, choices("auto", "cpu", "cuda")] = "auto"
    """Device of the engine."""

    kv_bytes: Size | None = None
    """Memory of a worker's KV cache, or of all models of its device together, such as 512MiB
    (default: from the free memory)."""

    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that weights, activations and KV cache may use without --kv-bytes."""

    threads: Positive | None = None
    """Threads of each CPU worker (default: its share of the cores, at least 1)."""

    own_process: bool = False
    """Run the engine in its own process, which helps with many open streams."""

    record_acceptance: str | None = None
    """File in which to record the drafts that were possible at each position of sampled requests,
    without their text. draftgate simulate --recording replays it."""

    record_acceptance_share: Share = 0.01
    """Share of the requests to record, chosen by their ids."""

    record_acceptance_proposers: Annotated[tuple[str, ...], kind("list")] = ()
    """Proposers to record in addition to ngram, such as draft_model. Each one drafts 16 tokens at
    every recorded position. Repeatable."""

    record_acceptance_tenants: bool = False
    """Record the tenant of each request."""

    record_acceptance_bytes: Size = 64 << 20
    """Maximum size of the recording before compression, such as 64MiB."""

    profile: str = "cpu-demo"
    """Step costs of the simulator: a shipped profile or a file."""

    sim_service_ms: Amount | None = None
    """Constant service time of a simulated request, in place of a profile."""

    sim_acceptance: Share = 0.6
    """Probability that the simulator accepts a draft token."""

    peer_secret_env: Annotated[str, kind("variable")] | None = None
    """Environment variable that holds the secret of the cluster's nodes (default: only nodes on
    this machine are peers)."""


ZmqAddress: TypeAlias = Annotated[str, Meta(pattern=r"^(tcp://[^\s*/]+:\d{1,5}|ipc://\S+)$")]
"""The address of a ZeroMQ socket, to which the gateway connects."""

LONGEST_PAUSE_S: Final = 30.0
"""Default of the longest pause of an upstream."""

CONNECT_TIMEOUT_S: Final = 5.0
"""Default of the time to open a connection to an upstream, which takes a round trip or two."""


class TokenPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of a model at an upstream, in USD per million tokens.

    Attributes:
        input: price of prompt tokens.
        output: price of output tokens.
        cached_input: price of prompt tokens that were cached, or None for that of other ones.
    """

    input: Amount
    output: Amount
    cached_input: Amount | None = None

    def usd(self, prompt_tokens: int, cached_tokens: int, output_tokens: float) -> float:
        """Return the cost of a request in USD.

        Args:
            cached_tokens: number of prompt tokens that were cached.
        """
        cached = self.input if self.cached_input is None else self.cached_input
        prompt = (prompt_tokens - cached_tokens) * self.input + cached_tokens * cached
        return (prompt + output_tokens * self.output) / 1e6


class UpstreamSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a server that runs requests, for the backends `openai` and `peer`.

    Attributes:
        url: its address, as `draftgate.addresses.read_server_url` returns it.
        name: its name in logs, metrics and decisions (default: `upstream-1`, `upstream-2`, ...).
        models: the only models of its list that clients may use, or empty for all.
        aliases: further names for clients, with the model of the upstream that each stands for.
        api_key_env: environment variable that holds its API key.
        api_key_file: file that holds its API key, which is read when the node starts.
        headers: headers that each request gets in addition.
        speculates: whether it drafts for every request, or None to read its metrics.
        concurrency: maximum concurrent requests, 0 to read its metrics, or None for the setting
            `upstream_concurrency`.
        weight: its share of the requests, relative to the weights of other upstreams, or 0 if it
            gets a request only if no other upstream can take it.
        price: prices by its names of its models, or of all other models under an empty name.
        max_pause_s: maximum time in seconds for which it gets no requests after a refusal or a
            failed probe, or None for the setting `upstream_max_pause_s`.
        connect_timeout_s: maximum time to open a connection in seconds, or None for the setting
            `upstream_connect_timeout_s`.
        first_byte_timeout_s: maximum time until the first byte of a stream in seconds, 0 for no
            limit, or None for the setting `upstream_first_byte_timeout_s`.
        response_timeout_s: maximum time until a response arrives that is not streamed, in seconds,
            0 for no limit, or None for the setting `upstream_response_timeout_s`.
        preemptible: whether requests of higher classes may abort those that it runs, or None for
            the setting `upstream_preemptible`.
        chats_only: whether it gets requests of `/v1/messages` and `/v1/responses` as chats, or None
            to try the endpoints.
        tokenizer: directory with the `tokenizer.json` of its models, with which the gateway encodes
            prompts to find out which servers have them cached.
        kv_events: address of the ZeroMQ socket that publishes its KV cache events, such as
            `tcp://host:5557`. It requires `tokenizer`.
        kv_events_replay: address of the socket that repeats these events.
        role: phase of requests that it computes. If the upstreams of a model have different roles,
            those for prompts hand the KV cache of each prompt to those for outputs.
    """

    url: str
    name: str = ""
    models: tuple[str, ...] = ()
    aliases: dict[str, str] = {}
    api_key_env: str | None = None
    api_key_file: str | None = None
    headers: dict[str, str] = {}
    speculates: bool | None = None
    concurrency: Count | None = None
    weight: Amount = 1.0
    price: dict[str, TokenPrice] = {}
    max_pause_s: Annotated[float, Meta(gt=0)] | None = None
    connect_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    first_byte_timeout_s: Amount | None = None
    response_timeout_s: Amount | None = None
    preemptible: bool | None = None
    chats_only: bool | None = None
    tokenizer: str | None = None
    kv_events: ZmqAddress | None = None
    kv_events_replay: ZmqAddress | None = None
    role: Role = Role.ANY

    @property
    def shown(self) -> str:
        """Its name and its address without a password, as `--upstream` takes them."""
        return f"{self.name}={mask_url(self.url)}" if self.name else mask_url(self.url)


class WorkerConfig(WorkerSettings, frozen=True, kw_only=True):
    """The configuration of one worker.

    Attributes:
        device_index: index of its device on the machine.
        num_workers: number of workers in this process, including this worker. Workers on a CPU
            share the memory.
        upstream: server that runs its requests, for backends that forward them.
        model_id: name of the model in its card, or None for that of the checkpoint.
        acceptance_cache: whether counts of accepted drafts are read at the start, and stored.
        memory_share: the share of its device's memory budget that the worker may take, if other
            models of the node have workers on the same device.
    """

    device_index: int = 0
    num_workers: int = 1
    upstream: UpstreamSettings | None = None
    model_id: str | None = None
    acceptance_cache: bool = False
    memory_share: float = 1.0

    def worker_id(self, prefix: str, number: int) -> str:
        """Return the id of a worker, with the name of its upstream or its number."""
        own = str(number) if self.upstream is None else self.upstream.name or str(number)
        return f"{prefix}-{own}" if prefix else own

    def step_limits(self, device_type: str) -> StepLimits:
        """Return the limits of a step, with the defaults of a type of device (`cpu`, `cuda`)."""
        default = STEP_LIMITS.get(device_type, STEP_LIMITS["cpu"])
        return StepLimits(
            default.sequences if self.max_num_seqs is None else self.max_num_seqs,
            default.tokens if self.max_step_tokens is None else self.max_step_tokens,
        )
