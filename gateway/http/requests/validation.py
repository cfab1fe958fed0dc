"""The validation of decoded bodies, and their conversion to jobs with tokenised prompts.

The functions are pure except for random seeds. A thread may run them, because the tokenising of a
long prompt would hold the event loop for too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from draftgate.backends.token_ids import TokenIds, compact
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import invalid
from draftgate.gateway.http.requests.decoding import client_name, decode
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.limits import (
    FIT_CONTEXT,
    NO_LIMIT,
    check_choices,
    check_ranges,
    most_output_tokens,
)
from draftgate.gateway.http.requests.messages import chat_prompt, continued_text, prompt_ending
from draftgate.gateway.http.requests.prompt_encoding import encode_prompt, infilled
from draftgate.gateway.http.requests.reasoning import (
    Reasoning,
    reasoning_of,
    template_variables,
)
from draftgate.gateway.http.requests.sampling import (
    check_allowed,
    echoed_texts,
    sampling_params,
    stop_texts,
)
from draftgate.gateway.http.requests.schemas import (
    ChatBody,
    CompletionBody,
    GenerationFields,
    Prediction,
    SpeculationOptions,
    StreamOptions,
)
from draftgate.gateway.http.requests.structured_outputs import grammar_of
from draftgate.gateway.http.requests.tools import OfferedTools, offered_tools
from draftgate.gateway.served_model import ServedModel
from draftgate.policies.speculation.repetition import repetition
from draftgate.policies.types import SpeculationMode
from draftgate.policies.values import immutable, replace

DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default for completions. Chats continue until the model ends or the context is full."""

_chat_decoder: Final = msgspec.json.Decoder(ChatBody)
_completion_decoder: Final = msgspec.json.Decoder(CompletionBody)


@immutable
class ParsedRequest:
    """A job, and the way to send its response.

    Attributes:
        include_usage: whether a stream ends with the token usage.
        continuous_usage: whether each chunk has the usage so far.
        tools: the functions that the response may call.
        reasoning: the reasoning that the response may have, or None.
        return_token_ids: whether the response has the token ids of prompt and output.
        tokens_as_ids: whether log probabilities name tokens by their ids.
        kept_choices: number of best choices of each prompt in the response, or None for all.
        hides_logprobs: whether log probabilities only serve to find the best choices.
        body: the decoded body, if the response needs more of its fields.
        conversation: the JSON array of all items before the response, if it is to be stored.
        echoed: text of each prompt with which its choices begin, or empty without `echo`.
        prompt_logprobs: number of alternatives in the field `prompt_logprobs`, or None without it.
    """

    job: Job
    served: ServedModel
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tools: OfferedTools | None = None
    reasoning: Reasoning | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    kept_choices: int | None = None
    hides_logprobs: bool = False
    body: msgspec.Struct | None = None
    conversation: bytes = b""
    echoed: tuple[str, ...] = ()
    prompt_logprobs: int | None = None


def parse_chat(body: bytes, served: ServedModel, sender: Sender) -> ParsedRequest:
    """Return the parsed form of the body of a chat completion.

    Raises:
        InvalidRequest: the request is malformed.
        RequestRejected: the model's template rejects the messages.
    """
    return parse_decoded_chat(decode(body, _chat_decoder), served, sender)


def parse_decoded_chat(wire: ChatBody, served: ServedModel, sender: Sender) -> ParsedRequest:
    """Return the parsed form of a decoded chat, as `parse_chat` does."""
    served = served.named(wire.model)
    _check_common(wire)
    tools = offered_tools(wire, served)
    special = bool(wire.add_special_tokens)
    check_choices(1, wire.n or 1, served.max_request_tokens)
    prompt = chat_prompt(
        wire.messages,
        served,
        tools,
        template_variables(wire, served.tokenizer),
        most_tokens=served.max_model_len,
        keep_tokens=_kept_tokens(wire, served),
        add_special_tokens=special,
        ending=prompt_ending(wire),
    )
    most = wire.max_completion_tokens
    max_tokens = wire.max_tokens if most is None else most
    parsed = _call(wire, served, sender, (prompt,), max_tokens, _chat_logprobs(wire))
    if wire.prediction is not None:
        ids = _prediction_ids(wire.prediction, served)
        parsed = replace(parsed, job=replace(parsed.job, prediction_ids=ids))
    if tools is not None:
        grammar = tools.grammar(parsed.job.grammar)
        parsed = replace(parsed, job=replace(parsed.job, grammar=grammar))
        check_allowed(parsed.job.sampling, grammar)
    # A grammar applies to the whole output, so such an output has no reasoning.
    reasons = parsed.job.grammar is None
    continued = continued_text(wire)
    reasoning = reasoning_of(prompt, served.tokenizer, continued) if reasons else None
    if tools is None and reasoning is None:
        return parsed
    return replace(parsed, tools=tools, reasoning=reasoning)


def with_grammar_param(parsed: ParsedRequest, names: Mapping[str, str]) -> ParsedRequest:
    """Return a request whose grammar has the client's name of the parameter that sets it."""
    grammar = parsed.job.grammar
    if grammar is None:
        return parsed
    named = replace(grammar, param=client_name(grammar.param, names) or grammar.param)
    return replace(parsed, job=replace(parsed.job, grammar=named))


def parse_completion(body: bytes, served: ServedModel, sender: Sender) -> ParsedRequest:
    """Return the parsed form of the body of a completion.

    Raises:
        InvalidRequest: the request is malformed.
    """
    wire = decode(body, _completion_decoder)
    served = served.named(wire.model)
    _check_common(wire)
    special = wire.add_special_tokens is not False
    n = _choices(wire)
    name = "n" if n == (wire.n or 1) else "best_of"
    check_choices(num_prompts(wire.prompt), n, served.max_request_tokens, name)
    prompts = prompts_of(
        "prompt",
        wire.prompt,
        served,
        keep_tokens=_kept_tokens(wire, served),
        add_special_tokens=special and not wire.suffix,
    )
    if wire.suffix:
        _check_with_suffix(wire)
        prompts = infilled(wire.suffix, served, prompts, add_special_tokens=special)
    max_tokens = DEFAULT_COMPLETION_TOKENS if wire.max_tokens is None else wire.max_tokens
    parsed = _call(wire, served, sender, prompts, max_tokens, wire.logprobs, generated=n)
    if wire.echo:
        parsed = replace(parsed, echoed=echoed_texts(wire, parsed.job.prompts, served.tokenizer))
    return parsed if n == parsed.job.n else _best_of(parsed, n)


def _choices(wire: CompletionBody) -> int:
    """Return the number of choices to generate for each prompt."""
    n = wire.n or 1
    if not wire.best_of or wire.best_of == n:
        return n
    if wire.echo or wire.prompt_logprobs is not None:
        raise invalid("best_of", "cannot be combined with echo or prompt_logprobs")
    if wire.best_of < n:
        raise invalid("best_of", f"must be at least n, which is {n}, not {wire.best_of}")
    if wire.stream:
        raise invalid("best_of", "must equal n in a stream, because the best choice is known last")
    return wire.best_of


def _best_of(parsed: ParsedRequest, n: int) -> ParsedRequest:
    """Return a request that generates `n` choices, with their log probabilities, and keeps some."""
    job = parsed.job
    sampling = replace(job.sampling, logprobs=job.sampling.logprobs or 0)
    return replace(
        parsed,
        job=replace(job, n=n, sampling=sampling),
        kept_choices=job.n,
        hides_logprobs=job.sampling.logprobs is None,
    )


def _check_with_suffix(wire: CompletionBody) -> None:
    for name in ("truncate_prompt_tokens", "echo", "prompt_logprobs"):
        if getattr(wire, name):
            raise invalid(name, "cannot be combined with suffix")


def _call(
    wire: GenerationFields,
    served: ServedModel,
    sender: Sender,
    prompts: tuple[TokenIds, ...],
    max_tokens: int | None,
    logprobs: int | None,
    *,
    generated: int | None = None,
) -> ParsedRequest:
    """Return the request for some prompts.

    Args:
        generated: number of choices to generate, if the response has only the best of them.
    """
    if max_tokens == NO_LIMIT:
        max_tokens = None
    speculation = wire.speculation or SpeculationOptions()
    prompts = tuple([_truncated(prompt, wire, served, max_tokens) for prompt in prompts])
    sampling = sampling_params(wire, served, max_tokens, logprobs)
    grammar = grammar_of(wire)
    check_allowed(sampling, grammar)
    allowed = most_output_tokens(
        prompts,
        generated or wire.n or 1,
        max_tokens,
        (sampling.prompt_logprobs, logprobs),
        served.max_request_tokens,
    )
    usual = served.defaults().max_new_tokens
    if max_tokens is None and allowed is not None:
        usual = allowed if usual is None else min(usual, allowed)
    job = Job(
        sender.request_id,
        prompts,
        sampling,
        max_tokens,
        wire.n or 1,
        speculation.mode or SpeculationMode.AUTO,
        speculation.max_draft_tokens,
        grammar,
        sender.service_level(wire.priority),
        sender.account.name,
        sender.account.share,
        tuple(map(repetition, prompts)),
        sender.fingerprint,
        sender.retries,
        traced=bool(speculation.trace),
        cache_salt=wire.cache_salt or "",
        adapter=served.adapter,
        usual_max_tokens=usual,
        corpus=speculation.corpus is not False,
    )
    options = wire.stream_options or StreamOptions()
    return ParsedRequest(
        job,
        served,
        bool(wire.stream),
        bool(options.include_usage),
        bool(options.continuous_usage_stats),
        prompt_logprobs=wire.prompt_logprobs,
        return_token_ids=bool(wire.return_token_ids),
        tokens_as_ids=bool(wire.return_tokens_as_token_ids),
    )


def _check_common(wire: GenerationFields) -> None:
    """Check the fields that chats and completions have in common."""
    check_ranges(wire)
    if wire.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "must not be 0, because a prompt needs a token")
    if wire.speculation is not None:
        check_ranges(wire.speculation, "speculation.")
    if options := wire.stream_options:
        if not wire.stream:
            raise invalid("stream_options", "requires stream: true")
        if options.continuous_usage_stats and not options.include_usage:
            raise invalid("stream_options.continuous_usage_stats", "requires include_usage: true")
    stop_texts(wire.stop)


def _kept_tokens(wire: GenerationFields, served: ServedModel) -> int | None:
    """Return the tokens of a prompt that `truncate_prompt_tokens` needs, as `encode_prompt`."""
    most = wire.truncate_prompt_tokens
    if most is None:
        return None
    if most == FIT_CONTEXT:
        most = served.max_model_len
    return -most if wire.truncation_side == "right" else most


def _truncated(
    prompt: TokenIds, wire: GenerationFields, served: ServedModel, max_tokens: int | None
) -> TokenIds:
    """Return the part of a prompt that `truncate_prompt_tokens` keeps."""
    most = wire.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == FIT_CONTEXT:
        most = max(served.max_model_len - (max_tokens or 1), 1)
    return prompt[:most] if wire.truncation_side == "right" else prompt[-most:]


def _prediction_ids(prediction: Prediction, served: ServedModel) -> tuple[int, ...]:
    """Return the tokens of a prediction, at most as many as an output can have."""
    content, most = prediction.content, served.max_model_len
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    text = served.tokenizer.beginning(text, most)
    return tuple(served.tokenizer.encode(text, add_special_tokens=False)[:most])


def _chat_logprobs(wire: ChatBody) -> int | None:
    if wire.logprobs:
        return wire.top_logprobs or 0
    if wire.top_logprobs:
        raise invalid("top_logprobs", "requires logprobs: true")
    return None


def num_prompts(given: str | list[str | int | list[int]] | None) -> int:
    """Return the number of prompts, of which a list of token ids is one."""
    if not isinstance(given, list) or not given or isinstance(given[0], int):
        return 1
    return len(given)


def prompts_of(
    name: str,
    given: str | list[str | int | list[int]] | None,
    served: ServedModel,
    *,
    keep_tokens: int | None = None,
    add_special_tokens: bool = True,
    prefix: str = "",
) -> tuple[TokenIds, ...]:
    """Return the token ids of every prompt.

    Args:
        name: name of the parameter.
        given: a text, token ids, or a list of either.
        keep_tokens: the number of tokens at the end of each text that are needed, or None for all.
        add_special_tokens: whether texts get the special tokens of the tokenizer, such as BOS.
        prefix: a text to put before each text that is not empty, but not before token ids.

    Raises:
        InvalidRequest: no prompt is given, a prompt is empty or cannot fit, or a token id is out
            of range.
    """
    encode = partial(
        _encoded,
        served,
        keep_tokens=keep_tokens,
        add_special_tokens=add_special_tokens,
        prefix=prefix,
    )
    if isinstance(given, str):
        return (encode(given, name),)
    if not given:
        raise invalid(name, "must be given and must not be empty")
    if all(isinstance(item, int) for item in given):
        return (_ids(given, served, name),)
    if any(isinstance(item, int) for item in given):
        raise invalid(name, "token ids cannot be mixed with texts or lists")
    return tuple(
        encode(item, f"{name}[{index}]")
        if isinstance(item, str)
        else _ids(item if isinstance(item, list) else (), served, f"{name}[{index}]")
        for index, item in enumerate(given)
    )


def _encoded(
    served: ServedModel,
    text: str,
    param: str,
    *,
    keep_tokens: int | None,
    add_special_tokens: bool,
    prefix: str,
) -> TokenIds:
    tokenizer = served.tokenizer
    ids = encode_prompt(
        tokenizer,
        prefix + text if text else text,
        served.max_model_len,
        param,
        keep_tokens=keep_tokens,
        add_special_tokens=add_special_tokens,
    )
    if not ids:
        begin = tokenizer.special_id("bos_token")
        if begin is None:
            raise invalid(param, "must not be empty")
        ids = [begin]
    return compact(ids)


def _ids(items: Sequence[object], served: ServedModel, param: str) -> TokenIds:
    ids = [item for item in items if isinstance(item, int)]
    if not ids:
        raise invalid(param, "must not be empty")
    for extreme in (min(ids), max(ids)):
        served.check_token_id(extreme, param)
    return compact(ids)
