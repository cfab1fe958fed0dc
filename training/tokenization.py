"""The demo tokenizer: byte-level BPE trained on the training part of the corpus."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
"""Number of tokens.

The vocabulary is small, because its tied embedding takes a fifth of the target and over half of the
draft.
"""

CONTEXT = 8192
"""Longest training sequence in tokens."""

END_OF_TEXT = "<|endoftext|>"
"""Separator of documents.

Every training document begins with this token, which serves as BOS and EOS.
"""

SPECIAL_TOKENS = (END_OF_TEXT, "<|user|>", "<|assistant|>", "<|end|>")
"""All special tokens. The last three are reserved for a later chat tuning and untrained."""

SPLIT_PATTERN = r"\n+|[ \t]{2,}| ?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s"
"""Pieces of a text before byte-pair merging. Every character matches one alternative.

Newlines are separate from indentation, so that a newline at the end of a prompt is common in
training. A whole run of indentation can be one token. Identifiers keep their underscores, as in
`__init__`.
"""

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- if tools %}
{{- '# Functions:\\n' }}
{%- for tool in tools %}
{{- '# ' + (tool.function | tojson) + '\\n' }}
{%- endfor %}
{{- '# Call a function with <tool_call>{"name": ..., "arguments": ...}</tool_call>.\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- '# ' + message.content.replace('\\n', '\\n# ') + '\\n' }}
{%- elif message.role == 'tool' %}
{{- '# Result: ' + message.content.replace('\\n', '\\n# ') + '\\n' }}
{%- else %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>\\n' }}
{%- endfor %}
{%- if message.role == 'assistant' and not message.tool_calls and not loop.last %}
{{- '\\n' }}
{%- endif %}
{%- endif %}
{%- endfor %}"""
"""The template of a Python document: user text is code to continue. System messages, functions and
their results are comments. Calls have the format of Hermes.
"""


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Train the BPE merges.

    The tokenizer decodes any encoded text to exactly that text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONTEXT,
}
"""Content of tokenizer_config.json, with field names for both old and new loaders."""


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into a checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS, indent=2) + "\n")


def read(folder: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint's folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
