"""From wire structs to jobs: values checked, prompts tokenised. Pure but for generated seeds.

May run in a thread: tokenising a long prompt takes longer than the event loop may be held.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from backends.tokenizer import Tokenizer
from backends.types import GrammarKind, GrammarSpec, SamplingParams
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.http.requests.decoding import decode, reject_unsupported
from gateway.http.requests.messages import chat_prompt
from gateway.http.requests.schemas import (
    ChatBody,
    CompletionBody,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
)
from gateway.job import Job
from policies.repetition import repetition
from policies.types import ANYTIME, ServiceLevel, SpeculationMode

MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024
MAX_TOP_LOGPROBS: Final = 20
MAX_BIASED_TOKENS: Final = 300
MAX_BIAS: Final = 100.0
"""OpenAI's bound: enough to force a token or to ban it."""

MAX_PENALTY: Final = 2.0
"""OpenAI's bound of frequency and presence penalties."""

REPETITION_PENALTIES: Final = (0.01, 100.0)
"""Wider than any model wants, and far from where float32 logits overflow."""

MAX_SEQUENCES: Final = 128
"""Most choices of all prompts of a request together: twice a default batch."""

DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default for completions; chat goes on until the model ends or the context is full."""

ANY_OBJECT: Final = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}')

MAX_PRIORITY: Final = 1 << 31
"""Classes beyond are no client's intent; these fit any wire."""

GENERATED_SEED_BELOW: Final = 1 << 53
"""JSON clients that read numbers as doubles keep such a seed."""

_chat_decoder: Final = msgspec.json.Decoder(ChatBody)
_completion_decoder: Final = msgspec.json.Decoder(CompletionBody)


@dataclass(frozen=True, slots=True)
class Served:
    """What validation must know of the model."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int

    def check_token_id(self, token_id: int, param: str) -> None:
        """Return if the model has such a token.

        Raises:
            InvalidRequest: it has not; `param` is named.
        """
        vocab = self.tokenizer.vocab_size
        if not 0 <= token_id < vocab:
            raise InvalidRequest(
                f"{param}: token ids must be between 0 and {vocab - 1}, not {token_id}", param
            )

    def check_name(self, asked: str | None) -> None:
        """Return if the client means this model; no name means it too.

        Raises:
            ModelNotFound: it means another one.
        """
        if asked is not None and asked != self.name:
            raise ModelNotFound(asked, self.name)


@dataclass(frozen=True, slots=True)
class Call:
    """A job and how its answer is to be sent."""

    job: Job
    stream: bool
    include_usage: bool


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
    wire = decode(body, _chat_decoder)
    served.check_name(wire.model)
    logprobs = _chat_logprobs(wire)
    max_tokens = wire.max_tokens
    name = "max_tokens"
    if wire.max_completion_tokens is not None:
        max_tokens, name = wire.max_completion_tokens, "max_completion_tokens"
    check_range(name, max_tokens, 1)
    _check_common(wire)
    prompts = (chat_prompt(wire.messages, served.tokenizer),)
    job = _job(wire, served, request_id, prompts, max_tokens, logprobs, service)
    return _call(wire, job)


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
    check_range("logprobs", wire.logprobs, 0, MAX_TOP_LOGPROBS)
    check_range("max_tokens", wire.max_tokens, 1)
    _check_common(wire)
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


def _call(wire: GenerationFields, job: Job) -> Call:
    options = wire.stream_options
    return Call(job, bool(wire.stream), bool(options and options.include_usage))


def _job(
    wire: GenerationFields,
    served: Served,
    request_id: str,
    prompts: tuple[tuple[int, ...], ...],
    max_tokens: int | None,
    logprobs: int | None,
    service: ServiceLevel,
) -> Job:
    seed = secrets.randbelow(GENERATED_SEED_BELOW) if wire.seed is None else wire.seed
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
        replace(service, priority=wire.priority or 0),
        repetitions=tuple(map(repetition, prompts)),
    )


def _check_common(wire: GenerationFields) -> None:
    """Check the values that both endpoints take."""
    check_range("n", wire.n, 1, MAX_CHOICES)
    check_range("temperature", wire.temperature, 0.0)
    check_range("top_p", wire.top_p, 0.0, 1.0)
    if wire.top_p == 0.0:
        raise InvalidRequest("top_p: must be greater than 0; for greedy, temperature 0", "top_p")
    check_range("top_k", wire.top_k, -1)
    check_range("min_p", wire.min_p, 0.0, 1.0)
    check_range("repetition_penalty", wire.repetition_penalty, *REPETITION_PENALTIES)
    check_range("frequency_penalty", wire.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_range("presence_penalty", wire.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_range("min_tokens", wire.min_tokens, 0)
    check_range("seed", wire.seed, 0, (1 << 64) - 1)
    check_range("priority", wire.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if wire.speculation is not None:
        check_range("speculation.max_draft_tokens", wire.speculation.max_draft_tokens, 0)
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options: only together with stream", "stream_options")
    _stops(wire.stop)
    reject_unsupported(wire, wire.n or 1)


def check_range(name: str, value: float | None, least: float, most: float | None = None) -> None:
    """Return if a value is within bounds, or not given.

    Raises:
        InvalidRequest: it is not; the parameter is named.
    """
    if value is None or (least <= value < math.inf and (most is None or value <= most)):
        return
    bounds = f"at least {least:g}" if most is None else f"between {least:g} and {_plain(most)}"
    raise InvalidRequest(f"{name}: must be {bounds}, not {value}", name)


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


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
        check_range("logit_bias", value, -MAX_BIAS, MAX_BIAS)
    return tuple(pairs)


def _chat_logprobs(wire: ChatBody) -> int | None:
    check_range("top_logprobs", wire.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if wire.logprobs:
        return wire.top_logprobs or 0
    if wire.top_logprobs:
        raise InvalidRequest("top_logprobs: only together with logprobs: true", "top_logprobs")
    return None


def prompts_of(
    name: str, given: str | list[str | int | list[int]] | None, served: Served
) -> tuple[tuple[int, ...], ...]:
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


def _encoded(text: str, tokenizer: Tokenizer, param: str) -> tuple[int, ...]:
    ids = tokenizer.encode(text)
    if not ids:
        begin = tokenizer.special_id("bos_token")
        if begin is None:
            raise InvalidRequest(f"{param}: must not be empty", param)
        ids = [begin]
    return tuple(ids)


def _ids(items: Sequence[object], served: Served, param: str) -> tuple[int, ...]:
    ids = tuple(item for item in items if isinstance(item, int))
    if not ids:
        raise InvalidRequest(f"{param}: must not be empty", param)
    for extreme in (min(ids), max(ids)):
        served.check_token_id(extreme, param)
    return ids
