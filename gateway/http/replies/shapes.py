"""The bodies of responses, as msgspec structs in OpenAI's format.

The field `metrics` is an extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType

from draftgate.backends.types import Task
from draftgate.gateway.http.replies.metric_shapes import OptionalMetrics, PoolingMetrics
from draftgate.gateway.http.requests.schemas import RerankDocument


class PromptTokensDetails(Struct):
    """The number of prompt tokens with cached keys and values."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """The numbers of tokens that the worker drafted from the prediction, and of reasoning tokens.

    The markers of reasoning are reasoning tokens.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class Usage(Struct):
    """The token usage of a request, summed over its choices.

    The field `completion_tokens_details` is present if the request has a prediction, or if its
    response may have reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


OptionalIds = Sequence[int] | UnsetType
OptionalUsage = Usage | UnsetType

StopReason = str | int | UnsetType | None
"""The field `stop_reason` of vLLM: the stop text or the stop token that ended a choice, or null.
Chunks before the end of a choice do not have the field."""


class TopLogprob(Struct):
    """A token of a chat and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobReply(TopLogprob):
    """An output token and the most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """The field `logprobs` of a chat choice."""

    content: list[TokenLogprobReply]


class CompletionLogprobs(Struct):
    """The field `logprobs` of a completion choice.

    Each list has one entry per token. The first token of an echoed prompt has no log probabilities.
    If several tokens have the same text, `top_logprobs` has the likeliest of them.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenReply(Struct):
    """A token at a position of the prompt.

    The field `rank` is the number of tokens that are at least as likely.
    """

    logprob: float
    rank: int
    decoded_token: str


PromptField = list[dict[int, PromptTokenReply] | None] | UnsetType
"""The field `prompt_logprobs`, with an entry for each token of the prompt.

An entry has the token itself and the likeliest tokens, by id. The first entry is null."""


class StepReply(Struct):
    """The tokens that one step added to a choice, and the fate of its draft.

    The fields `survivals` and `price` are those of `backends.types.StepTrace`. Each text is one
    token.
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
    """The name of a function, and the JSON of its arguments as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A function call in a whole response."""

    id: str
    function: FunctionCall
    type: str = "function"


class FunctionCallDelta(Struct):
    """A part of a function call.

    The first part has the name, and later parts have pieces of the arguments.
    """

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """A part of a function call.

    The first part has the id and the name.
    """

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(Struct):
    """The message of a whole response.

    The content is null if the message consists only of calls or reasoning.
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatDelta(Struct):
    """A part of a message.

    The first part of a choice has the role.
    """

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct):
    """A choice of a chat response.

    The field `token_ids` has the tokens of the output, if the request has `return_token_ids`.
    """

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    steps: list[StepReply] | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    stop_reason: StopReason = UNSET


class ChatChunkChoice(Struct):
    """A choice of a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    steps: list[StepReply] | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    stop_reason: StopReason = UNSET


class CompletionChoice(Struct):
    """A choice of a completion or of its chunk.

    The fields `token_ids` and `prompt_token_ids` are present if the request has `return_token_ids`.
    Only the first chunk of a choice has the tokens of the prompt.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    steps: list[StepReply] | UnsetType = UNSET
    prompt_logprobs: PromptField = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    stop_reason: StopReason = UNSET


Choice = TypeVar("Choice")


class Reply(Struct, Generic[Choice]):
    """A response, or a chunk of a stream.

    Only whole chats have the field `prompt_logprobs`, because completions have it in each choice.
    The field `prompt_token_ids` is present in chats with `return_token_ids`, and in the first chunk
    of their streams.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: OptionalUsage = UNSET
    metrics: OptionalMetrics = UNSET
    prompt_logprobs: PromptField = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatReply(Reply[ChatChoice]):
    """A chat completion."""


class ChatChunk(Reply[ChatChunkChoice]):
    """A chunk of a streamed chat completion."""


class CompletionReply(Reply[CompletionChoice]):
    """A completion, or a chunk of a streamed completion."""


class EmbeddingReply(Struct):
    """A vector, as a list of numbers or in base64."""

    index: int
    embedding: Raw
    object: str = "embedding"


class PromptUsage(Struct):
    """The token usage of a request without output."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """The response of `/v1/embeddings`."""

    data: list[EmbeddingReply]
    model: str
    usage: PromptUsage
    object: str = "list"
    metrics: PoolingMetrics | UnsetType = UNSET


class ScoreReply(Struct):
    """The score of a pair of texts, by its place in the request."""

    index: int
    score: float
    object: str = "score"


class ScoreList(Struct):
    """The response of `/score`."""

    id: str
    created: int
    model: str
    data: list[ScoreReply]
    usage: PromptUsage
    object: str = "list"
    metrics: PoolingMetrics | UnsetType = UNSET


class RerankResult(Struct):
    """A document with its score.

    The field `index` is its place in the request. The field `document` is absent if the request has
    `return_documents: false`.
    """

    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankReply(Struct):
    """The response of `/v1/rerank`, with the highest score first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RerankResult]
    metrics: PoolingMetrics | UnsetType = UNSET


class ModelReply(Struct):
    """An entry of `/v1/models`.

    A LoRA adapter has the name of its model in `parent` and the origin of its checkpoint in `root`,
    as in vLLM. The fields from `tasks` on are extensions, which the model of an upstream lacks.
    `tasks` names what the model does, `chat` says whether the model has a chat template,
    `proposers` names what its workers draft with, `simulated` says whether a simulator stands in
    for the model, and `default_parameters` has the sampling parameters that its checkpoint
    recommends, for requests that do not set them.
    """

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "draftgate"
    parent: str | None = None
    tasks: Sequence[Task] | UnsetType = UNSET
    chat: bool | UnsetType = UNSET
    proposers: list[str] | UnsetType = UNSET
    simulated: bool | UnsetType = UNSET
    default_parameters: dict[str, float] | UnsetType = UNSET


class ModelList(Struct):
    """The response of `/v1/models`."""

    data: list[ModelReply]
    object: str = "list"


class TokenizeReply(Struct, omit_defaults=True):
    """The response of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class InputTokensReply(Struct):
    """The response of `/v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class InputItemList(Struct):
    """A page of the input items of a stored response."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedResponse(Struct):
    """The confirmation that a stored response is deleted."""

    id: str
    object: str = "response"
    deleted: bool = True


class DetokenizeReply(Struct):
    """The response of `/detokenize`."""

    prompt: str


class WorkerHealth(Struct):
    """A worker of the node.

    The field `reason` says why the worker failed or gets no requests.
    """

    id: str
    status: str
    reason: str | UnsetType = UNSET


class HealthReply(Struct):
    """The response of `/health`.

    The field `reason` says why the node failed, or why no worker is available.
    """

    status: str
    in_flight: int
    workers: list[WorkerHealth]
    reason: str | UnsetType = UNSET


class ReadyReply(Struct):
    """The response of `/ready`.

    The field `progress` is the completed share of loading, while a model loads. The field `reason`
    says why no worker is available. The field `workers` lists the workers that get no requests at
    present.
    """

    status: str
    progress: float | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    workers: list[WorkerHealth] | UnsetType = UNSET


class VersionReply(Struct):
    """The response of `/version`."""

    version: str
