"""The parameter `suffix`: prompts for models that fill in the middle of a text (FIM)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from draftgate.backends.token_ids import TokenIds, compact
from draftgate.gateway.errors import Unsupported
from draftgate.gateway.http.requests.prompt_encoding import encode_prompt
from draftgate.gateway.served_model import ServedModel

FORMATS: Final = (
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
    tokens = next((form for form in FORMATS if known.keys() >= set(form)), None)
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
