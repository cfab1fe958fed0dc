"""The towers' tokenizer: WordPiece over the words of identifiers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE: Final = 6144
"""Number of tokens. The embedding takes a third of the weights of the document tower."""

PAD, UNKNOWN = "[PAD]", "[UNK]"
SPECIAL_TOKENS: Final = (PAD, UNKNOWN)
"""Padding serves training only. The towers pool the mean, so a text needs no first token."""

CASE_BORDER: Final = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
"""Where the words of `parseHTMLDocument` meet. A docstring has the same words in lower case."""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train the vocabulary on queries and passages."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN, max_input_chars_per_word=64))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(CASE_BORDER), " "),
            normalizers.Replace("_", " "),
            normalizers.BertNormalizer(lowercase=True, strip_accents=True),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(individual_digits=False)]
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        limit_alphabet=200,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into a checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "model_max_length": max_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
