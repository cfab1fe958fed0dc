"""The sampling parameters of a request, with the model's defaults for those it does not set."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final, TypeVar

from draftgate.backends.generation_defaults import GenerationDefaults
from draftgate.backends.token_ids import TokenIds
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GrammarSpec, SamplingParams
from draftgate.gateway.errors import Unsupported, invalid
from draftgate.gateway.http.requests.limits import (
    BIAS,
    LEAST_STOP_CHARACTERS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    RANDOM_SEED,
)
from draftgate.gateway.http.requests.schemas import CompletionBody, GenerationFields
from draftgate.gateway.served_model import ServedModel

N = TypeVar("N", int, float)

_SEEDS: Final = (1 << 64) - 1
"""The seeds of the noise. A negative seed is the unsigned number with the same 64 bits."""

GENERATED_SEED_BITS: Final = 53
"""Size of a generated seed, which clients that read JSON numbers as doubles keep exactly."""


def sampling_params(
    wire: GenerationFields, served: ServedModel, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        max_tokens: maximum number of output tokens, or None if the size of the job decides.
        logprobs: number of alternatives of each output token, or None without log probabilities.

    Raises:
        InvalidRequest: a parameter is invalid.
        Unsupported: a combination of parameters is not supported.
    """
    usual = served.defaults()
    random_seed = wire.seed in {None, RANDOM_SEED}
    return SamplingParams(
        max_tokens=1 if max_tokens is None else max_tokens,
        seed=secrets.randbits(GENERATED_SEED_BITS) if random_seed else (wire.seed or 0) & _SEEDS,
        temperature=_temperature(wire, usual),
        top_k=max(_first(wire.top_k, usual.top_k, 0), 0),
        top_p=_first(wire.top_p, usual.top_p, 1.0) or 1.0,
        min_p=_first(wire.min_p, usual.min_p, 0.0),
        logit_bias=_logit_bias(wire.logit_bias, served),
        repetition_penalty=_first(wire.repetition_penalty, usual.repetition_penalty, 1.0),
        frequency_penalty=_first(wire.frequency_penalty, usual.frequency_penalty, 0.0),
        presence_penalty=_first(wire.presence_penalty, usual.presence_penalty, 0.0),
        min_tokens=wire.min_tokens or 0,
        stop=stop_texts(wire.stop),
        ignore_eos=bool(wire.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_alternatives(wire),
        stop_token_ids=_stop_token_ids(wire.stop_token_ids or (), served),
        bad_words=bad_words(wire.bad_words or (), served.tokenizer),
        skip_special_tokens=wire.skip_special_tokens is not False,
        include_stop_str_in_output=bool(wire.include_stop_str_in_output),
        allowed_token_ids=_allowed_token_ids(wire, served),
    )


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts. Empty texts are ignored, because clients send them for none.

    Raises:
        InvalidRequest: the texts are too long or too many.
    """
    if not stop:
        return ()
    texts = dict.fromkeys((stop,) if isinstance(stop, str) else stop)
    texts.pop("", None)
    if sum(max(len(text), LEAST_STOP_CHARACTERS) for text in texts) > MAX_STOP_CHARACTERS:
        most = f"must have at most {MAX_STOP_CHARACTERS} characters in total"
        raise invalid("stop", f"{most}, where each text counts for {LEAST_STOP_CHARACTERS} or more")
    return tuple(texts)


def check_allowed(sampling: SamplingParams, grammar: GrammarSpec | None) -> None:
    """Check that a request does not restrict its tokens twice, which could leave none of them.

    Raises:
        InvalidRequest: the request restricts its tokens by their ids and by a grammar.
    """
    if sampling.allowed_token_ids and grammar is not None:
        raise invalid("allowed_token_ids", f"cannot be combined with {grammar.param}")


def _first(given: N | None, usual: N | None, otherwise: N) -> N:
    """Return the first value that is set."""
    if given is not None:
        return given
    return otherwise if usual is None else usual


def _temperature(wire: GenerationFields, usual: GenerationDefaults) -> float:
    """Return the temperature, which is 0 if `top_p` keeps no more than the likeliest token."""
    if _first(wire.top_p, usual.top_p, 1.0) == 0:
        return 0.0
    return _first(wire.temperature, usual.temperature, 1.0)


def _stop_token_ids(ids: Sequence[int], served: ServedModel) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"must have at most {MAX_STOP_TOKENS} ids, not {len(ids)}")
    for index, token_id in enumerate(ids):
        served.check_token_id(token_id, f"stop_token_ids[{index}]")
    return tuple(ids)


def _allowed_token_ids(wire: GenerationFields, served: ServedModel) -> tuple[int, ...]:
    """Return the only tokens that the client allows, ascending, or nothing if it allows all."""
    if wire.allowed_token_ids is None:
        return ()
    ids = sorted(set(wire.allowed_token_ids))
    if not ids:
        raise invalid("allowed_token_ids", "must not be empty")
    for extreme in (ids[0], ids[-1]):
        served.check_token_id(extreme, "allowed_token_ids")
    ends = {*(wire.stop_token_ids or ()), *(() if wire.ignore_eos else served.eos_ids)}
    if wire.min_tokens and ends.issuperset(ids):
        raise invalid("allowed_token_ids", "must have a token that does not end the output")
    return tuple(ids)


def _logit_bias(
    bias: dict[int, float] | None, served: ServedModel
) -> tuple[tuple[int, float], ...]:
    """Return the bias of each token id, in ascending order."""
    pairs = sorted((bias or {}).items())
    if len(pairs) > MAX_BIASED_TOKENS:
        raise invalid(
            "logit_bias", f"must have at most {MAX_BIASED_TOKENS} tokens, not {len(pairs)}"
        )
    for token_id, value in pairs:
        served.check_token_id(token_id, "logit_bias")
        BIAS.check("logit_bias", value)
    return tuple(pairs)


def bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that the output must not contain.

    As in vLLM, a word is forbidden in the tokens of its own encoding, at the beginning of a text
    and after a space. Other tokenizations of the word remain possible. Empty words are ignored.

    Raises:
        InvalidRequest: the words are too many, or a word is too long.
    """
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"must have at most {MAX_BAD_WORDS} words, not {len(words)}")
    if any(len(word) > MAX_BAD_WORD_CHARACTERS for word in words):
        text = f"each word must have at most {MAX_BAD_WORD_CHARACTERS} characters"
        raise invalid("bad_words", text)
    found = dict[tuple[int, ...], None]()  # in the order of the words, without repetitions
    for word in filter(None, words):
        alone, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")
        )
        found[alone] = None
        if spaced[-len(alone) :] != alone:  # otherwise the first sequence forbids both
            found[spaced] = None
    return tuple(ids for ids in found if ids)


def prompt_alternatives(wire: GenerationFields) -> int | None:
    """Return the number of alternatives to compute for each token of the prompt.

    Returns:
        None if the response has no log probabilities of the prompt.

    Raises:
        Unsupported: a stream cannot contain the log probabilities.
    """
    if wire.prompt_logprobs is None and not getattr(wire, "echo", None):
        return None  # the usual case
    if wire.prompt_logprobs is not None and wire.stream:
        raise Unsupported("prompt_logprobs", " together with stream")
    echoed = wire.logprobs if isinstance(wire, CompletionBody) and wire.echo else None
    # Only the first choice computes them, and its chunks may follow those of other choices.
    if echoed is not None and wire.stream and (wire.n or 1) > 1:
        raise Unsupported("echo", " together with logprobs and stream for n above 1")
    wanted = [number for number in (wire.prompt_logprobs, echoed) if number is not None]
    return max(wanted, default=None)


def echoed_texts(
    wire: CompletionBody, prompts: Sequence[TokenIds], tokenizer: Tokenizer
) -> tuple[str, ...]:
    """Return the text of each prompt with which its choices begin, or nothing without `echo`.

    Args:
        prompts: token ids of each prompt.
    """
    if not wire.echo:
        return ()
    given: Sequence[object] = wire.prompt if isinstance(wire.prompt, list) else (wire.prompt,)
    if isinstance(given[0], int):  # a single prompt of token ids
        given = (given,)
    return tuple(
        text
        if isinstance(text, str) and wire.truncate_prompt_tokens is None
        else tokenizer.decode(ids, skip_special_tokens=False)
        for text, ids in zip(given, prompts, strict=True)
    )
