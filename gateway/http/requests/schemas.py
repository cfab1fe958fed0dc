"""The bodies of requests, as msgspec structs.

Decoding checks the types, and `validation` checks the values. The module `inventory` lists the
fields that the structs do not have.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, defstruct
from msgspec.structs import fields

from draftgate.gateway.accounts import KeySettings
from draftgate.gateway.http.requests.inventory import (
    EMBEDDING,
    GENERATION,
    NONE,
    SCORING,
    TOKENS,
    FieldLists,
)
from draftgate.policies.types import Role, SpeculationMode

ToolMode = Literal["none", "auto", "required"]

KEY_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._@:-]{0,63}$"
"""Names of created keys, which need no escapes in a path."""

KEY_NAME_WORDS: Final = (
    "1 to 64 letters, digits and characters of ._@:-, of which the first is a letter or a digit"
)

MOST_LIFE_S: Final = 100 * 366 * 86_400
MOST_GRACE_S: Final = 30 * 86_400

CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
"""A text that separates the cached prefixes of a tenant."""


class Wire(Struct, forbid_unknown_fields=True):
    """An object of a body. `decoding` removes the fields that it does not have."""


class Body(Wire):
    """The body of a request, with the inventory of the fields that clients send in addition."""

    lists: ClassVar[FieldLists] = NONE


class StreamOptions(Wire):
    """The field `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculationOptions(Wire):
    """The field `speculation`, with the client's preferences.

    The response describes each step if `trace` is true. If `corpus` is false, the request uses no
    drafts from earlier outputs, and its output is not kept for later drafts.
    """

    mode: SpeculationMode | None = None
    max_draft_tokens: int | None = None
    trace: bool | None = None
    corpus: bool | None = None


class TextFormat(Wire, tag_field="type", tag="text"):
    """The `response_format` for any text."""


class JsonObjectFormat(Wire, tag_field="type", tag="json_object"):
    """The `response_format` for a JSON object, which satisfies the schema if there is one."""

    schema: dict[str, Any] | None = None


class JsonSchemaOptions(Wire):
    """The field `response_format.json_schema`.

    The worker compiles the schema. If `strict` is true, the worker refuses keywords that it cannot
    enforce. If it is false, the worker ignores them.
    """

    schema: Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Wire, tag_field="type", tag="json_schema"):
    """The `response_format` for a JSON value that satisfies a schema.

    In llama.cpp's form, the schema is part of the format itself.
    """

    json_schema: JsonSchemaOptions | None = None
    schema: dict[str, Any] | None = None


class RegexFormat(Wire, tag_field="type", tag="regex"):
    """The `response_format` for a text that a regular expression matches fully (an extension)."""

    pattern: str


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat


class StructuredOutputs(Wire):
    """The field `structured_outputs` of vLLM, in which at most one form is given.

    JSON always has one layout, so `disable_any_whitespace` has no effect.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None


class SharedFields(Body):
    """The fields that all endpoints that generate text have in common."""

    lists: ClassVar[FieldLists] = GENERATION

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: dict[int, float] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    min_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = None
    speculation: SpeculationOptions | None = None
    priority: int | None = None
    cache_salt: CacheSalt | None = None


class GenerationFields(SharedFields):
    """The fields that chats and completions have in common."""

    max_tokens: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_options: StreamOptions | None = None


class ThinkingOptions(Wire):
    """The field `thinking` as an object."""

    type: Literal["enabled", "disabled"]


class CompletionBody(GenerationFields):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


class ContentPart(Wire):
    """A part of a message's content.

    Only the assistant refuses.
    """

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Wire):
    """The field `function` of a call.

    The arguments are JSON in a string, as the model wrote them.
    """

    name: str
    arguments: str


class ToolCallMessage(Wire, tag_field="type", tag="function"):
    """A call in an earlier message of the assistant."""

    id: str
    function: CalledFunction


class Message(Wire):
    """A chat message."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class Function(Wire):
    """A function on offer.

    The field `parameters` is the JSON schema of its arguments.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire, tag_field="type", tag="function"):
    """A tool on offer, which is always a function."""

    function: Function


class NamedFunction(Wire):
    """The function to call."""

    name: str


class NamedTool(Wire, tag_field="type", tag="function"):
    """A `tool_choice` that names one function."""

    function: NamedFunction


class AllowedTool(Wire, tag_field="type", tag="function"):
    """A function that the response may call."""

    function: NamedFunction


class AllowedTools(Wire):
    """The functions that the response may call, and whether it must call one of them."""

    tools: list[AllowedTool]
    mode: ToolMode = "auto"


class AllowedToolChoice(Wire, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that allows some of the tools."""

    allowed_tools: AllowedTools


class TextPart(Wire, tag_field="type", tag="text"):
    """A part of a text."""

    text: str


class Prediction(Wire, tag_field="type", tag="content"):
    """The output that the client predicts, from which the worker drafts."""

    content: str | list[TextPart]


class ChatBody(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingOptions | None = None


class EmbeddingBody(Body):
    """Body of `POST /v1/embeddings`."""

    lists: ClassVar[FieldLists] = EMBEDDING

    input: str | list[str | int | list[int]] | None = None
    model: str | None = None
    input_type: Literal["query", "document"] | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None


class RerankDocument(Wire):
    """A document as an object."""

    text: str


class RerankBody(Body):
    """Body of `POST /v1/rerank`."""

    lists: ClassVar[FieldLists] = SCORING

    query: str
    documents: list[str | RerankDocument]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    priority: int | None = None


class ScoreBody(Body):
    """Body of `POST /score`, with one of four pairs of names for the texts."""

    lists: ClassVar[FieldLists] = SCORING

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    model: str | None = None
    max_tokens_per_doc: int | None = None
    priority: int | None = None


class BatchBody(Body):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class TokenizeBody(Body):
    """Body of `POST /tokenize`, with a prompt or with messages and the tools on offer."""

    lists: ClassVar[FieldLists] = TOKENS

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    lists: ClassVar[FieldLists] = TOKENS

    tokens: list[int]
    skip_special_tokens: bool | None = None
    model: str | None = None


class WorkerRoleBody(Body):
    """Body of `PUT /workers/{worker_id}/role`."""

    role: Role


class KeyBody(KeySettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /keys`. The key expires after `expires_in_s` seconds, or never."""

    lists: ClassVar[FieldLists] = NONE

    name: Annotated[str, Meta(pattern=KEY_NAME, description=KEY_NAME_WORDS)]
    expires_in_s: Annotated[float, Meta(gt=0, le=MOST_LIFE_S)] | None = None


KeyChangesBody: Final = defstruct(
    "KeyChangesBody",
    [
        ("expires_in_s", Annotated[float, Meta(gt=0, le=MOST_LIFE_S)] | None | UnsetType, UNSET),
        *((one.name, one.type | UnsetType, UNSET) for one in fields(KeySettings)),
    ],
    namespace={
        "__doc__": "Body of `PATCH /keys/{name}`. Settings that it does not have stay as they are.",
        "lists": NONE,
    },
    module=__name__,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
)


class RotationBody(Body):
    """Body of `POST /keys/{name}/rotate`. The present secret ends after `grace_s` seconds."""

    grace_s: Annotated[float, Meta(ge=0, le=MOST_GRACE_S)] = 0.0


class SessionBody(Body):
    """Body of `POST /session`."""

    key: str
