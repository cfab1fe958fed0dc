"""The tokenising of prompts, which is skipped for prompts that cannot fit into the context.

A body of 8 MB takes seconds to tokenise. A prompt whose bytes need too many tokens, even if all of
them were the longest token, is rejected at once.

The library tokenises a text in one call, which nothing can stop. If the client leaves during this
call, the work ends with this text. The text has at most the bytes of the context's tokens, if all
were the longest token, and fits into a body. The time grows linearly with the bytes: the default
maximum body of 8 MiB takes 2 to 7 s of one core, by kind of text (AMD EPYC Zen 4, 2026-11-23).
Splitting texts would have to reproduce the rules of each tokenizer, so texts stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from draftgate.backends.token_ids import TokenIds, compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.errors import ContextTooLong, Unsupported
from draftgate.gateway.offload import stop_if_abandoned
from draftgate.gateway.served_model import ServedModel


def encode_prompt(
    tokenizer: Tokenizer,
    text: str,
    most_tokens: int | None,
    param: str,
    *,
    keep_tokens: int | None = None,
    add_special_tokens: bool,
) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        most_tokens: the length of the context, or None without a limit.
        param: path of the prompt in the request.
        keep_tokens: the number of tokens at the end that are needed, or None for all. If it is
            negative, they are at the beginning. The result has at least this number of tokens, if
            the whole prompt has.

    Raises:
        ContextTooLong: the prompt cannot fit, by its bytes.
        Abandoned: the client has disconnected.
    """
    stop_if_abandoned()
    if keep_tokens is not None and keep_tokens < 0:
        text = tokenizer.beginning(text, -keep_tokens)
    elif keep_tokens is not None:
        text = tokenizer.ending(text, keep_tokens)
    elif most_tokens is not None and (least := tokenizer.least_tokens(text)) > most_tokens:
        raise too_long(param, most_tokens, f"at least {least}")
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def too_long(param: str, most_tokens: int, tokens: str) -> ContextTooLong:
    """Return the error of a text with this number of tokens, which the context does not hold."""
    limit = f"this model's maximum context length is {most_tokens} tokens"
    return ContextTooLong(f"{param}: {limit}, but the text has {tokens}", param)


INFILLING_FORMATS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""The tokens before the prefix, before the suffix and before the middle: of Qwen2.5-Coder and
CodeGemma, of StarCoder and Granite, and of DeepSeek-Coder."""


def infilled(
    suffix: str, served: ServedModel, prefixes: Iterable[TokenIds], *, add_special_tokens: bool
) -> tuple[TokenIds, ...]:
    """Return the prompts for the texts between prefixes and a suffix.

    Args:
        suffix: the text after the output.
        served: the model.
        prefixes: the tokens of the texts before the output, without special tokens.
        add_special_tokens: whether the prompts begin with the tokenizer's special tokens.

    Raises:
        Unsupported: the vocabulary has no tokens for such prompts.
        ContextTooLong: the suffix cannot fit into the context, by its bytes.
    """
    tokenizer = served.tokenizer
    known = tokenizer.vocabulary
    tokens = next((form for form in INFILLING_FORMATS if known.keys() >= set(form)), None)
    if tokens is None:
        raise Unsupported("suffix", " by this model, whose vocabulary has no tokens for it")
    before_prefix, before_suffix, before_middle = (known[token] for token in tokens)
    after = encode_prompt(
        tokenizer, suffix, served.max_model_len, "suffix", add_special_tokens=False
    )
    begin = tokenizer.encode("", add_special_tokens=add_special_tokens)
    return tuple(
        compact([*begin, before_prefix, *prefix, before_suffix, *after, before_middle])
        for prefix in prefixes
    )
