"""The bodies of requests, as msgspec structs.

Decoding checks the types, and `validation` checks the values. Unknown fields are ignored, because
clients send many.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Raw, Struct

from draftgate.policies.types import Role, SpeculationMode

ToolMode = Literal["none", "auto", "required"]


CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
"""A text that separates the cached prefixes of a tenant."""


class StreamOptions(Struct):
    """The field `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculationOptions(Struct):
    """The field `speculation`, with the client's preferences.

    The response describes each step if `trace` is true.
    """

    mode: SpeculationMode | None = None
    max_draft_tokens: int | None = None
    trace: bool | None = None


class TextFormat(Struct, tag_field="type", tag="text"):
    """The `response_format` for any text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    """The `response_format` for any JSON object."""


class JsonSchemaOptions(Struct):
    """The field `response_format.json_schema`.

    The worker compiles the schema. Every schema is enforced exactly, so `strict` has no effect.
    """

    name: str
    schema: Raw
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """The `response_format` for a JSON value that satisfies a schema."""

    json_schema: JsonSchemaOptions


class RegexFormat(Struct, tag_field="type", tag="regex"):
    """The `response_format` for a text that a regular expression matches fully (an extension)."""

    pattern: str


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat


class StructuredOutputs(Struct):
    """The field `structured_outputs` of vLLM, in which at most one form is given.

    JSON always has one layout, so `disable_any_whitespace` has no effect. The last three fields are
    not supported.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None


class UnsupportedFields(Struct):
    """Fields that change the output and are not supported.

    Only neutral values are accepted.
    """

    add_generation_prompt: Any = None
    allowed_token_ids: Any = None
    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    include_stop_str_in_output: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    modalities: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None


class GenerationFields(UnsupportedFields):
    """The fields that chats and completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
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
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None
    priority: int | None = None
    cache_salt: CacheSalt | None = None
    user: str | None = None


class ThinkingOptions(Struct, forbid_unknown_fields=True):
    """The field `thinking` as an object."""

    type: Literal["enabled", "disabled"]


class CompletionBody(GenerationFields):
    """Body of `POST /v1/completions`.

    Only chats support the fields in `ONLY_IN_CHATS`.
    """

    chat_template_kwargs: Any = None
    enable_thinking: Any = None
    thinking: Any = None
    tool_choice: Any = None
    tools: Any = None
    prompt: str | list[str | int | list[int]] | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


ONLY_IN_CHATS: Final = (
    *("chat_template_kwargs", "enable_thinking", "thinking", "tool_choice", "tools"),
)


class ContentPart(Struct):
    """A part of a message's content.

    Only the assistant refuses.
    """

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Struct):
    """The field `function` of a call.

    The arguments are JSON in a string, as the model wrote them.
    """

    name: str
    arguments: str


class ToolCallMessage(Struct, tag_field="type", tag="function"):
    """A call in an earlier message of the assistant."""

    id: str
    function: CalledFunction


class Message(Struct):
    """A chat message."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None


class Function(Struct):
    """A function on offer.

    The field `parameters` is the JSON schema of its arguments.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, tag_field="type", tag="function"):
    """A tool on offer, which is always a function."""

    function: Function


class NamedFunction(Struct):
    """The function to call."""

    name: str


class NamedTool(Struct, tag_field="type", tag="function"):
    """A `tool_choice` that names one function."""

    function: NamedFunction


class AllowedTool(Struct, tag_field="type", tag="function"):
    """A function that the response may call."""

    function: NamedFunction


class AllowedTools(Struct):
    """The functions that the response may call, and whether it must call one of them."""

    tools: list[AllowedTool]
    mode: ToolMode = "auto"


class AllowedToolChoice(Struct, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that allows some of the tools."""

    allowed_tools: AllowedTools


class TextPart(Struct, tag_field="type", tag="text"):
    """A part of a text."""

    text: str


class Prediction(Struct, tag_field="type", tag="content"):
    """The output that the client predicts, from which the worker drafts."""

    content: str | list[TextPart]


ONLY_IN_COMPLETIONS: Final = ("best_of", "echo", "suffix")


class ChatBody(GenerationFields):
    """Body of `POST /v1/chat/completions`.

    Only completions support the fields in `ONLY_IN_COMPLETIONS`.
    """

    best_of: int | None = None
    echo: Any = None
    suffix: Any = None
    messages: list[Message] | None = None
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


class UnsupportedEmbeddingFields(UnsupportedFields):
    """Fields that change an embedding, and are not supported."""

    echo: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None


class EmbeddingBody(UnsupportedEmbeddingFields):
    """Body of `POST /v1/embeddings`."""

    input: str | list[str | int | list[int]] | None = None
    model: str | None = None
    input_type: Literal["query", "document"] | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    user: str | None = None


class UnsupportedRerankFields(Struct):
    """Fields that change a score, and are not supported."""

    max_tokens_per_query: Any = None
    rank_fields: Any = None
    truncate_prompt_tokens: Any = None
    use_activation: Any = None


class RerankDocument(Struct):
    """A document as an object."""

    text: str


class RerankBody(UnsupportedRerankFields, kw_only=True):
    """Body of `POST /v1/rerank`."""

    query: str
    documents: list[str | RerankDocument]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    priority: int | None = None
    user: str | None = None


class TokenizeBody(Struct):
    """Body of `POST /tokenize`, with a prompt or with messages and the tools on offer."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Struct):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class WorkerRoleBody(Struct):
    """Body of `PUT /workers/{worker_id}/role`."""

    role: Role
