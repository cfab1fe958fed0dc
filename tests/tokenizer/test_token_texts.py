"""Texts of single tokens, for decoders of several kinds."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from draftgate.backends.core.detokenize import TextStream
from draftgate.backends.token_texts import TokenTexts, _is_local
from draftgate.backends.tokenizer import Tokenizer

WORDS = ["▁the", "▁", "a", "é", "▁é", "\ufffd", "▁▁", "x▁y"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
IDS = range(len(WORDS) + len(BYTES))
EMOJI = [len(WORDS) + byte for byte in "🙂".encode()]
INVALID = len(WORDS) + 0xFF


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """A tokenizer that decodes as those of Llama 2 and Mistral do."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    vocab = {token: place for place, token in enumerate([*WORDS, *BYTES])}
    fast = FastTokenizer(models.BPE(vocab, [], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@given(st.lists(st.sampled_from(IDS), max_size=20), st.lists(st.sampled_from(IDS), max_size=8))
@example([0, *EMOJI, 0], [1])
@example([INVALID, 2 + len(WORDS), *EMOJI, 0], [])
@example([*EMOJI[:2], 0, *EMOJI[2:], INVALID, INVALID, INVALID, INVALID, INVALID, 0], [0])
def test_pieces_are_those_of_decoding_all(sentencepiece: Tokenizer, ids, context) -> None:
    """Also where bytes fall back and a start is stripped, tokens alone add what decoding adds."""
    fast, slow = (
        TextStream(sentencepiece.decode, (), context, alone=alone)
        for alone in (sentencepiece.texts.__getitem__, lambda _token: None)
    )
    assert [*map(fast.add, ids), fast.flush()] == [*map(slow.add, ids), slow.flush()]


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Metaspace", "replacement": "▁"},
        {"type": "CTC"},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
        {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"},
        {"type": "Replace", "pattern": {"Regex": "."}, "content": "c"},
    ],
)
def test_where_tokens_change_each_other_none_is_looked_up(decoder) -> None:
    """Decoders that join, clean up or strip at the end leave every text to decoding."""
    assert not _is_local({"type": "Sequence", "decoders": [{"type": "Fuse"}, decoder]})
    assert TokenTexts(lambda ids: "a" * len(ids), decoder, [0])[1] is None
