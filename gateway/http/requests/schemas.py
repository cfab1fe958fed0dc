"""The bodies of requests, as msgspec structs.

Decoding checks the types, and `validation` checks the values. Unknown fields are ignored, because
clients send many.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Raw, Struct

from draftgate.policies.types import SpeculationMode

ToolMode = Literal["none", "auto", "required"]


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


class UnsupportedFields(Struct):
    """Fields that change the output and are not supported.

    Only neutral values are accepted.
    """

    add_generation_prompt: Any = None
    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    best_of: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    documents: Any = None
    enable_thinking: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    include_stop_str_in_output: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    modalities: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    skip_special_tokens: Any = None
    stop_token_ids: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    thinking: Any = None
    truncate_prompt_tokens: Any = None
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
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None
    priority: int | None = None
    user: str | None = None


class CompletionBody(GenerationFields):
    """Body of `POST /v1/completions`.

    Only chats support tools.
    """

    tool_choice: Any = None
    tools: Any = None
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None


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


class Prediction(Struct, tag_field="type", tag="content"):
    """The output that the client predicts, from which the worker drafts."""

    content: str | list[ContentPart]


class ChatBody(GenerationFields):
    """Body of `POST /v1/chat/completions`.

    Only completions support `echo`.
    """

    echo: Any = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None


class EmbeddingBody(UnsupportedFields):
    """Body of `POST /v1/embeddings`."""

    echo: Any = None
    prompt_logprobs: Any = None
    input: str | list[str | int | list[int]] | None = None
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    priority: int | None = None
    user: str | None = None


class TokenizeBody(Struct):
    """Body of `POST /tokenize`, with a prompt or with messages and the tools on offer."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Struct):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None
