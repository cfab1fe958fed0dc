"""The parameter `suffix`: prompts for models that fill in the middle of a text (FIM)."""

from __future__ import annotations

from typing import Final

from draftgate.backends.token_ids import TokenIds, compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.errors import Unsupported

FORMATS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""The tokens before the prefix, before the suffix and before the middle: of Qwen2.5-Coder and
CodeGemma, of StarCoder and Granite, and of DeepSeek-Coder."""


def infilled(
    suffix: str, tokenizer: Tokenizer, prefix: TokenIds, *, add_special_tokens: bool
) -> TokenIds:
    """Return the prompt for the text between a prefix and a suffix.

    Args:
        suffix: the text after the output.
        tokenizer: the tokenizer of the model.
        prefix: the tokens of the text before the output, without special tokens.
        add_special_tokens: whether the prompt begins with the tokenizer's special tokens.

    Raises:
        Unsupported: the vocabulary has no tokens for such prompts.
    """
    known = tokenizer.vocabulary
    tokens = next((form for form in FORMATS if known.keys() >= set(form)), None)
    if tokens is None:
        raise Unsupported("suffix", " by this model, whose vocabulary has no tokens for it")
    before_prefix, before_suffix, before_middle = (known[token] for token in tokens)
    after = tokenizer.encode(suffix, add_special_tokens=False)
    begin = tokenizer.encode("", add_special_tokens=add_special_tokens)
    return compact([*begin, before_prefix, *prefix, before_suffix, *after, before_middle])
