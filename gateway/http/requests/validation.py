"""From wire structs to jobs: values checked, prompts tokenised. Pure but for generated seeds.

May run in a thread: tokenising a long prompt takes longer than the event loop may be held.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from draftgate.backends.token_ids import TokenIds, compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GrammarKind, GrammarSpec, SamplingParams
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.requests.decoding import decode, reject_unsupported
from draftgate.gateway.http.requests.limits import (
    BIAS,
    MAX_BIASED_TOKENS,
    MAX_SEQUENCES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    check_ranges,
)
from draftgate.gateway.http.requests.messages import Place, chat_prompt
from draftgate.gateway.http.requests.schemas import (
    ChatBody,
    CompletionBody,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    StreamOptions,
)
from draftgate.gateway.http.requests.tools import OfferedTools, offered_tools
from draftgate.gateway.served import Served
from draftgate.policies.speculation.repetition import repetition
from draftgate.policies.types import ANYTIME, ServiceLevel, SpeculationMode

DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default for completions; chat goes on until the model ends or the context is full."""

NO_STREAM_OPTIONS: Final = StreamOptions()

ANY_OBJECT: Final = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}')

GENERATED_SEED_BITS: Final = 53
"""JSON clients that read numbers as doubles keep such a seed."""

_chat_decoder: Final = msgspec.json.Decoder(ChatBody)
_completion_decoder: Final = msgspec.json.Decoder(CompletionBody)


@dataclass(frozen=True, slots=True)
class Call:
    """A job and how its answer is to be sent.

    Attributes:
        include_usage: a stream ends with what was used.
        continuous_usage: each of its chunks has what was used so far, too.
        tools: what the answer may call.
        asked: the request, where the answer repeats parts of it.
    """

    job: Job
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    tools: OfferedTools | None = None
    asked: msgspec.Struct | None = None


def chat_call(
    body: bytes, served: Served, request_id: str, service: ServiceLevel = ANYTIME
) -> Call:
    """Return the call of a chat completion's body.

    Args:
        service: what the headers asked for.

    Raises:
        InvalidRequest: something is wrong with it; the parameter is named.
        RequestRejected: the model's template refuses the messages.
    """
    return call_of_chat(decode(body, _chat_decoder), served, request_id, service)


def call_of_chat(
    wire: ChatBody,
    served: Served,
    request_id: str,
    service: ServiceLevel,
    places: Sequence[Place] | None = None,
) -> Call:
    """Return the call of a chat.

    Args:
        places: of its messages in the request; None where they are its `messages`.

    Raises:
        InvalidRequest, RequestRejected: as `chat_call`.
    """
    served.check_name(wire.model)
    _check_common(wire)
    reject_unsupported(wire, wire.n or 1)
    tools = offered_tools(wire, served.tokenizer.tool_template)
    shown = None if tools is None else tools.shown
    prompts = (chat_prompt(wire.messages, served.tokenizer, shown, places),)
    most = wire.max_completion_tokens
    max_tokens = wire.max_tokens if most is None else most
    job = _job(wire, served, request_id, prompts, max_tokens, _chat_logprobs(wire), service)
    if tools is not None and tools.grammar is not None:
        job = replace(job, grammar=tools.grammar)
    return _call(wire, job, tools)


def completion_call(
    body: bytes, served: Served, request_id: str, service: ServiceLevel = ANYTIME
) -> Call:
    """Return the call of a completion's body.

    Args:
        service: what the headers asked for.

    Raises:
        InvalidRequest: something is wrong with it; the parameter is named.
    """
    wire = decode(body, _completion_decoder)
    served.check_name(wire.model)
    _check_common(wire)
    reject_unsupported(wire, wire.n or 1, "tools", "tool_choice")
    prompts = prompts_of("prompt", wire.prompt, served)
    if len(prompts) * (wire.n or 1) > MAX_SEQUENCES:
        raise InvalidRequest(
            f"prompt: {len(prompts)} prompts of {wire.n or 1} choices are more than "
            f"{MAX_SEQUENCES} sequences",
            "prompt",
        )
    max_tokens = DEFAULT_COMPLETION_TOKENS if wire.max_tokens is None else wire.max_tokens
    job = _job(wire, served, request_id, prompts, max_tokens, wire.logprobs, service)
    return _call(wire, job)


def _call(wire: GenerationFields, job: Job, tools: OfferedTools | None = None) -> Call:
    options = wire.stream_options or NO_STREAM_OPTIONS
    return Call(
        job,
        bool(wire.stream),
        bool(options.include_usage),
        bool(options.continuous_usage_stats),
        tools,
    )


def _job(
    wire: GenerationFields,
    served: Served,
    request_id: str,
    prompts: tuple[TokenIds, ...],
    max_tokens: int | None,
    logprobs: int | None,
    service: ServiceLevel,
) -> Job:
    seed = secrets.randbits(GENERATED_SEED_BITS) if wire.seed is None else wire.seed
    speculation = wire.speculation
    sampling = SamplingParams(
        max_tokens=max_tokens or 1,
        seed=seed,
        temperature=1.0 if wire.temperature is None else wire.temperature,
        top_k=max(wire.top_k or 0, 0),
        top_p=1.0 if wire.top_p is None else wire.top_p,
        min_p=wire.min_p or 0.0,
        logit_bias=_logit_bias(wire.logit_bias, served),
        repetition_penalty=1.0 if wire.repetition_penalty is None else wire.repetition_penalty,
        frequency_penalty=wire.frequency_penalty or 0.0,
        presence_penalty=wire.presence_penalty or 0.0,
        min_tokens=wire.min_tokens or 0,
        stop=_stops(wire.stop),
        ignore_eos=bool(wire.ignore_eos),
        logprobs=logprobs,
    )
    return Job(
        request_id,
        prompts,
        sampling,
        max_tokens,
        wire.n or 1,
        (speculation.mode if speculation else None) or SpeculationMode.AUTO,
        speculation.max_draft_tokens if speculation else None,
        _grammar(wire.response_format),
        replace(service, priority=wire.priority) if wire.priority else service,
        repetitions=tuple(map(repetition, prompts)),
        traced=bool(speculation and speculation.trace),
    )


def _check_common(wire: GenerationFields) -> None:
    """Check the values that both endpoints take."""
    check_ranges(wire)
    if wire.speculation is not None:
        check_ranges(wire.speculation, "speculation.")
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options: only together with stream", "stream_options")
    if options := wire.stream_options:
        _check_stream_options(options)
    _stops(wire.stop)


def _check_stream_options(options: StreamOptions) -> None:
    if options.continuous_usage_stats and not options.include_usage:
        param = "stream_options.continuous_usage_stats"
        raise InvalidRequest(f"{param}: only together with include_usage", param)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: at most {MAX_STOPS} texts, not {len(stops)}", "stop")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop: each text must have 1 to {MAX_STOP_CHARACTERS} characters", "stop"
            )
    return stops


def _grammar(wanted: ResponseFormat | None) -> GrammarSpec | None:
    """Return what the output must be; whether it can be compiled is the worker's business."""
    match wanted:
        case JsonObjectFormat():
            return ANY_OBJECT
        case JsonSchemaFormat(options):
            return GrammarSpec(GrammarKind.JSON_SCHEMA, _schema(bytes(options.schema)))
        case RegexFormat(pattern):
            return GrammarSpec(GrammarKind.REGEX, pattern)
        case _:
            return None


def _schema(raw: bytes) -> str:
    """Return a schema's JSON."""
    param = "response_format.json_schema.schema"
    if not raw.startswith(b"{"):
        raise InvalidRequest(f"{param}: expected object", param)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{param}: {error}", param) from None


def _logit_bias(bias: dict[int, float] | None, served: Served) -> tuple[tuple[int, float], ...]:
    """Return what is added to which tokens' logits, by ascending token id."""
    pairs = sorted((bias or {}).items())
    if len(pairs) > MAX_BIASED_TOKENS:
        raise InvalidRequest(
            f"logit_bias: at most {MAX_BIASED_TOKENS} tokens, not {len(pairs)}", "logit_bias"
        )
    for token_id, value in pairs:
        served.check_token_id(token_id, "logit_bias")
        BIAS.check("logit_bias", value)
    return tuple(pairs)


def _chat_logprobs(wire: ChatBody) -> int | None:
    if wire.logprobs:
        return wire.top_logprobs or 0
    if wire.top_logprobs:
        raise InvalidRequest("top_logprobs: only together with logprobs: true", "top_logprobs")
    return None


def prompts_of(
    name: str, given: str | list[str | int | list[int]] | None, served: Served
) -> tuple[TokenIds, ...]:
    """Return the token ids of every prompt: a text, token ids, or a list of either.

    Args:
        name: of the parameter.

    Raises:
        InvalidRequest: there is none, one is empty, or the model has no such token.
    """
    tokenizer = served.tokenizer
    if isinstance(given, str):
        return (_encoded(given, tokenizer, name),)
    if not given:
        raise InvalidRequest(f"{name}: must be given and not be empty", name)
    if all(isinstance(item, int) for item in given):
        return (_ids(given, served, name),)
    if any(isinstance(item, int) for item in given):
        raise InvalidRequest(f"{name}: token ids cannot be mixed with texts or lists", name)
    return tuple(
        _encoded(item, tokenizer, f"{name}[{index}]")
        if isinstance(item, str)
        else _ids(item if isinstance(item, list) else (), served, f"{name}[{index}]")
        for index, item in enumerate(given)
    )


def _encoded(text: str, tokenizer: Tokenizer, param: str) -> TokenIds:
    ids = tokenizer.encode(text)
    if not ids:
        begin = tokenizer.special_id("bos_token")
        if begin is None:
            raise InvalidRequest(f"{param}: must not be empty", param)
        ids = [begin]
    return compact(ids)


def _ids(items: Sequence[object], served: Served, param: str) -> TokenIds:
    ids = [item for item in items if isinstance(item, int)]
    if not ids:
        raise InvalidRequest(f"{param}: must not be empty", param)
    for extreme in (min(ids), max(ids)):
        served.check_token_id(extreme, param)
    return compact(ids)
