"""The request fields of OpenAI, Anthropic, vLLM, SGLang and llama.cpp that are not implemented.

Each field of these APIs is in one of three groups. *Implemented* fields are those of the structs of
the bodies, and their aliases. A *refused* field would change the response, so the request fails
with an error that names the field, unless its value asks for nothing. A *harmless* field cannot
change the response. A field in no group is unknown: the server ignores it, and logs its name.

The path of a nested field has dots and no indexes, such as `stream_options.include_obfuscation`.
The path `*.cache_control` means this field of any nested object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

EMPTY: Final[tuple[Any, ...]] = (False, 0, "", [], {})
"""The values that usually ask for nothing, in addition to null."""


class Refused(NamedTuple):
    """A field that is not supported.

    Attributes:
        advice: why it is not supported, or what to use instead.
        neutral: the accepted values besides null, which change nothing.
    """

    advice: str
    neutral: tuple[Any, ...] = EMPTY


@dataclass(frozen=True, slots=True)
class FieldLists:
    """The fields of an endpoint that are not implemented, by their paths.

    Attributes:
        harmless: the reason why each field cannot change the response.
        aliases: the implemented fields of which each name is an alias. Each endpoint has one.
    """

    refused: Mapping[str, Refused]
    harmless: Mapping[str, str]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


NONE: Final = FieldLists({}, {})
"""The lists of bodies that only Draftgate has."""


def _refused(names_by_advice: Mapping[str, str]) -> dict[str, Refused]:
    return {name: Refused(advice) for name, advice in _by_name(names_by_advice).items()}


def _by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Return the text for each name, from the names for each text."""
    return {name: text for text, several in names.items() for name in several.split()}


_MEDIA: Final = "concerns images, audio or video, which no endpoint accepts"
_LABELS: Final = "only labels, bills or routes the request"
_CACHES: Final = "is a hint for a cache, which the server fills without hints"

_HARMLESS: Final = _by_name(
    {
        _LABELS: (
            "billing_policy bootstrap_host bootstrap_port bootstrap_room custom_labels "
            "data_parallel_rank disagg_prefill_dp_rank id_slot inference_geo metadata request_id "
            "rid routed_dp_rank safety_identifier service_tier session_id user user_profile_id "
            "workspace_id"
        ),
        _MEDIA: (
            "image images_config max_dynamic_patch media_io_kwargs min_dynamic_patch "
            "mm_processor_kwargs use_audio_in_video video_config mm_payload return_mm_kwargs"
        ),
        _CACHES: (
            "cache_control *.cache_control cache_prompt n_cache_reuse prompt_cache_key "
            "prompt_cache_options prompt_cache_retention *.prompt_cache_breakpoint"
        ),
    }
)

_TEMPLATE: Final = "the template of the model is used"
_LENGTH: Final = "the model decides on the length of its reasoning"
_MERGED: Final = "name an adapter in model"

GENERATION: Final = FieldLists(
    {
        **_refused(
            {
                "sample with temperature, top_k, top_p and min_p": (
                    "adaptive_target dry_multiplier dynatemp_range min_keep mirostat samplers "
                    "use_beam_search"
                ),
                "the server runs no code of clients": (
                    "custom_logit_processor custom_params logits_processors vllm_xargs"
                ),
                "the server reads and writes only text": "audio prompt_embeds",
                "use tools": "functions",
                "the server runs no tools": "container mcp_servers",
                "put the documents into the messages": "documents",
                _TEMPLATE: "chat_format chat_parser chat_template generation_prompt task",
                "send messages": "input_ids",
                "use previous_response_id or send all messages": (
                    "background compaction context_management conversation "
                    "previous_input_messages session_params"
                ),
                "send all messages": "thread",
                "use instructions": "personality",
                "send the text of the prompt": "prompt",
                _MERGED: "lora lora_path",
                "use cache_salt": "extra_key",
                "use return_token_ids of chats and completions": (
                    "return_input_ids_in_sglext return_output_ids_in_sglext "
                    "return_prompt_token_ids return_token_ids return_tokens"
                ),
                "use logprobs of chats and completions": (
                    "logprob_token_ids logprobs n_probs post_sampling_probs prompt_logprobs "
                    "return_flat_raw_output_top_logprobs return_sampling_mask "
                    "return_tokens_as_token_ids sampling_logprobs_mode top_logprobs"
                ),
                "responses have no such field": (
                    "enable_response_messages response_fields return_cached_tokens_details "
                    "return_hidden_states return_meta_info return_prompt_text "
                    "return_routed_experts return_spec_tokens_details return_token_offsets verbose"
                ),
                "workers exchange KV blocks by themselves": "ec_transfer_params kv_transfer_params",
                "use max_tokens": "t_max_predict_ms",
                "use stop or stop_token_ids": "repetition_detection stop_regex",
                "outputs have no watermark": "watermark watermarking",
                "outputs are not moderated": "moderation",
                "the server has no such service": "access_programs fallback_credit_token fallbacks",
                "the server writes the grammar of calls itself": (
                    "grammar_lazy grammar_triggers grammar_type preserved_tokens"
                ),
                _LENGTH: ("reasoning_budget_message reasoning_control"),
                "only completions support it": "echo suffix",
                "use prompt and suffix": "input_extra input_prefix input_suffix",
                "only chats support it": ("chat_template_kwargs enable_thinking thinking tools"),
                "put the indentation into the prompt": "n_indent",
                "this option of vLLM is not supported": (
                    "structured_outputs.disable_additional_properties "
                    "structured_outputs.structural_tag structured_outputs.whitespace_pattern"
                ),
                "use one grammar for the whole output": "response_format.structures",
            }
        ),
        "add_generation_prompt": Refused("only chats support it", (True,)),
        "continue_final_message": Refused("only chats support it"),
        "best_of": Refused("only completions support it", (0, 1)),
        "n": Refused("the response has one output; send several requests", (1,)),
        "n_cmpl": Refused("use n of chats and completions", (1,)),
        "function_call": Refused("use tool_choice", ("none", "auto", "")),
        "tool_choice": Refused("only chats support it", ("none", "auto", "")),
        "messages.function_call": Refused("use tool_calls", ()),
        "messages.clear_at": Refused("leave out messages to clear them", (*EMPTY, "never")),
        "messages.output_config": Refused("use output_config of the request"),
        "output_config.task_budget": Refused("use max_tokens"),
        "messages.audio": Refused("the server reads and writes only text"),
        "reasoning.context": Refused("the model decides on its reasoning", (*EMPTY, "auto")),
        "reasoning.mode": Refused("the model decides on its reasoning", (*EMPTY, "auto")),
        "tools.allowed_callers": Refused("only the model calls tools", ([], ["direct"])),
        "tools.async": Refused("the client sends the results of calls as input"),
        "tools.defer_loading": Refused("the prompt shows all tools; send only those to show"),
        "tools.input_examples": Refused("put the examples into the description"),
        "thinking.budget_tokens": Refused(_LENGTH),
        "web_search_options": Refused("the server runs no tools", ()),
        "modalities": Refused("the server writes only text", (["text"], [])),
        "length_penalty": Refused("it needs a beam search", (0, 1)),
        "top_n_sigma": Refused("use min_p", (0, -1)),
        "xtc_probability": Refused("use temperature", (0,)),
        "typical_p": Refused("use top_p", (1,)),
        "repeat_last_n": Refused("the penalty applies to all tokens", (-1,)),
        "include_reasoning": Refused("responses have the reasoning", (True,)),
        "separate_reasoning": Refused("reasoning is a field of its own", (True,)),
        "stream_reasoning": Refused("reasoning is streamed", (True,)),
        "reasoning_format": Refused("reasoning is a field of its own", ("auto", "deepseek")),
        "parse_tool_calls": Refused("calls are a field of their own", (True,)),
        **{
            name: Refused(_LENGTH, (-1,))
            for name in (
                "reasoning_budget_tokens",
                "thinking_budget_tokens",
                "thinking_token_budget",
            )
        },
        "speed": Refused("the server has one speed", ("standard",)),
    },
    {
        **_HARMLESS,
        **_by_name(
            {
                "has no effect without a field that is refused": (
                    "adaptive_decay dry_allowed_length dry_base dry_penalty_last_n "
                    "dry_sequence_breakers dynatemp_exponent mirostat_eta mirostat_tau "
                    "reasoning_budget_end_tag reasoning_budget_end_tags "
                    "reasoning_budget_start_tag return_flat_raw_top_logprobs_b64 "
                    "routed_experts_prompt_start routed_experts_start_len xtc_threshold"
                ),
                "changes how the text is computed or sent, but not the text": (
                    "backend_sampling sse_ping_interval stream_interval stream_options "
                    "stream_options.include_obfuscation"
                ),
                "only adds figures about progress and time": (
                    "diagnostics return_progress timings_per_token"
                ),
                "the context is never shifted": "n_discard n_keep",
                "special tokens have no spaces between them": "spaces_between_special_tokens",
                "responses of this endpoint are not stored": "store",
                "is a hint that no supported model reads": "verbosity",
                "names features that the fields of the request switch on": "betas",
                "describes earlier output, and is not part of the prompt": (
                    "input.async input.caller input.content.annotations input.content.logprobs "
                    "input.encrypted_content input.id input.namespace input.phase input.status "
                    "input.summary messages.content.caller messages.content.citations "
                    "messages.content.content.citations messages.content.toolset_name "
                    "system.citations"
                ),
                "does not concern the text of a call": (
                    "tools.eager_input_streaming tools.output_schema tools.strict"
                ),
                "reasoning is shown, and not signed": "thinking.block_binding thinking.display",
            }
        ),
    },
    {
        "max_completion_tokens": ("max_tokens", "max_output_tokens"),
        "max_new_tokens": ("max_tokens", "max_output_tokens"),
        "max_tokens": ("max_output_tokens",),
        "min_length": ("min_tokens",),
        "min_new_tokens": ("min_tokens",),
        "n_cmpl": ("n",),
        "no_stop_trim": ("include_stop_str_in_output",),
        "n_predict": ("max_tokens", "max_output_tokens"),
        "repeat_penalty": ("repetition_penalty",),
    },
)
"""The fields of requests that generate text, or count the tokens of such requests."""

_POOLING: Final = _refused(
    {
        "texts are not truncated": "truncate_prompt_tokens truncation_side",
        "a text and its instruction are sent as one text": "instruct instruction",
        _TEMPLATE: "chat_template chat_template_kwargs",
        _MERGED: "lora_path",
    }
)

EMBEDDING: Final = FieldLists(
    {
        **_POOLING,
        **_refused(
            {
                "send texts or token ids as input": (
                    "content continue_final_message echo embed_override_token_id embed_overrides "
                    "messages prompt_logprobs"
                ),
            }
        ),
        "add_generation_prompt": Refused(_TEMPLATE),
        "embd_normalize": Refused("vectors have the length 1", (2,)),
        "embed_dtype": Refused("vectors are float32", ("float32",)),
        "endianness": Refused("vectors are little-endian", ("native", "little")),
        "padding": Refused("texts are not padded", ("do_not_pad",)),
        "use_activation": Refused("vectors have the length 1", (True,)),
    },
    {**_HARMLESS, "cache_salt": "embeddings of other tenants are not reused"},
)
"""The fields of requests for embeddings."""

SCORING: Final = FieldLists(
    {
        **_POOLING,
        **_refused(
            {
                "only max_tokens_per_doc truncates": "max_tokens_per_query",
                "documents are texts": "rank_fields",
                "send query and documents": "data_1 data_2 items queries text_1 text_2 texts",
            }
        ),
        "padding": Refused("texts are not padded", ("do_not_pad",)),
        "return_text": Refused("use return_documents"),
        "use_activation": Refused("scores are between 0 and 1", (True,)),
    },
    {**_HARMLESS, "cache_salt": "scores are not cached"},
)
"""The fields of requests for scores of pairs of texts."""

TOKENS: Final = FieldLists(
    {
        **_refused(
            {
                _TEMPLATE: "chat_template",
                "use prompt": "content",
                "use return_token_strs": "with_pieces",
                "use chat_template_kwargs": "reasoning_effort",
            }
        ),
        "parse_special": Refused("special tokens in texts are parsed", (True,)),
        "skip_special_tokens": Refused("texts contain special tokens"),
        "tool_choice": Refused("leave out the tools", ("auto", "")),
    },
    _HARMLESS,
    {"add_special": ("add_special_tokens",)},
)
"""The fields of requests to convert between texts and tokens."""
