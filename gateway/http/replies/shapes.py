"""What clients receive, as msgspec structs in OpenAI's shapes; `metrics` is ours."""

from __future__ import annotations

from typing import Generic, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Of a prompt's tokens, those whose keys and values were cached."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of a request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculativeDecoding(Struct):
    """What was decided about speculation, and what came of it."""

    policy: str
    mode: str
    proposer: str | None
    max_draft_tokens: int
    reason: str
    price: float | None
    num_spec_steps: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: tuple[int, ...]


class PromptMetrics(Struct):
    """Where one prompt of several ran, and what speculation did for its choices."""

    worker_id: str
    speculative_decoding: SpeculativeDecoding


class ResumeReply(Struct):
    """A worker went on with a prompt whose own was lost, from the tokens that it had.

    The text is that of an undisturbed run where the numerics class is the same and promises it.
    """

    prompt: int
    from_worker_id: str
    to_worker_id: str
    kept_tokens: int
    same_numerics_class: bool


class ResponseMetrics(Struct):
    """What is needed to repeat the request, and what speculation did (contract).

    With several prompts, worker and decision are the first one's and the outcome is the sum;
    `prompts` has each by itself. Where a worker was lost, these are of the one that went on, and
    `resumes` tells of each time; what the lost one drafted for unfinished choices nobody knows.
    """

    seed: int
    numerics_class: str | None
    worker_id: str
    speculative_decoding: SpeculativeDecoding
    prompts: list[PromptMetrics] | UnsetType = UNSET
    resumes: list[ResumeReply] | UnsetType = UNSET


OptionalUsage = Usage | UnsetType
OptionalMetrics = ResponseMetrics | UnsetType


class TopLogprob(Struct):
    """A token and its log probability, chat form."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobReply(TopLogprob):
    """An output token with the likeliest others."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprobReply]


class CompletionLogprobs(Struct):
    """`logprobs` of a completion choice; one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class StepReply(Struct):
    """What one step added to a choice, and what became of its draft (`speculation.trace`).

    `survivals` and `price` are as in `backends.types.StepTrace`; texts are those of single tokens.
    """

    tokens: list[str]
    proposer: str | None
    offered: int
    drafts: list[str]
    accepted: int
    survivals: list[float]
    price: float
    reason: str


class FunctionCall(Struct):
    """What is called, and the JSON of its arguments as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call of the whole answer."""

    id: str
    function: FunctionCall
    type: str = "function"


class FunctionCallDelta(Struct):
    """More of a call: its name once, its arguments piece by piece."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """A piece of a call; the first one has its id and name."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(Struct):
    """The whole answer; its content is null where it is calls alone."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(Struct):
    """A piece of the answer; the first one of a choice has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(Struct):
    """A choice of a chat response."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    steps: list[StepReply] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A choice of a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    steps: list[StepReply] | UnsetType = UNSET


class CompletionChoice(Struct):
    """A choice of a completion, whole or chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    steps: list[StepReply] | UnsetType = UNSET


Choice = TypeVar("Choice")


class Reply(Struct, Generic[Choice]):
    """A response or a chunk; `usage` and `metrics` only where they belong."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: OptionalUsage = UNSET
    metrics: OptionalMetrics = UNSET


class ChatReply(Reply[ChatChoice]):
    """A chat completion."""


class ChatChunk(Reply[ChatChunkChoice]):
    """A piece of a streamed chat completion."""


class CompletionReply(Reply[CompletionChoice]):
    """A completion, or a piece of a streamed one."""


class EmbeddingReply(Struct):
    """A vector: the JSON of a list of numbers, or of base64."""

    index: int
    embedding: Raw
    object: str = "embedding"


class EmbeddingUsage(Struct):
    """Tokens of an embedding request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """The answer of `/v1/embeddings`."""

    data: list[EmbeddingReply]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class ModelReply(Struct):
    """An entry of `/v1/models`."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "draftgate"


class ModelList(Struct):
    """The answer of `/v1/models`."""

    data: list[ModelReply]
    object: str = "list"


class TokenizeReply(Struct):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeReply(Struct):
    """The answer of `/detokenize`."""

    prompt: str


class WorkerHealth(Struct):
    """A worker of the node; `reason` says why it failed, or is left alone."""

    id: str
    status: str
    reason: str | UnsetType = UNSET


class HealthReply(Struct):
    """The answer of `/health`; `reason` says why the node failed."""

    status: str
    in_flight: int
    workers: list[WorkerHealth]
    reason: str | UnsetType = UNSET


class ReadyReply(Struct):
    """The answer of `/ready`.

    `progress` is the share of loading that is done; `reason` why no worker serves now.
    """

    status: str
    progress: float | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class VersionReply(Struct):
    """The answer of `/version`."""

    version: str
