"""Tests of the texts of single tokens with several kinds of decoders."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from draftgate.backends.core.detokenize import TextStream
from draftgate.backends.tokenizer import Tokenizer, TokenTexts, _is_local

WORDS = ["▁the", "▁", "a", "é", "▁é", "\ufffd", "▁▁", "x▁y"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
IDS = range(len(WORDS) + len(BYTES))
EMOJI = [len(WORDS) + byte for byte in "🙂".encode()]
INVALID = len(WORDS) + 0xFF


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """A tokenizer with the decoder of Llama 2 and Mistral."""
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
def test_token_texts_agree_with_decoding_all_tokens(sentencepiece: Tokenizer, ids, context) -> None:
    """The texts of single tokens join to the decoded text, including byte fallback."""
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
def test_context_dependent_decoder_has_no_token_texts(decoder) -> None:
    """A decoder that depends on context has no texts of single tokens."""
    assert not _is_local({"type": "Sequence", "decoders": [{"type": "Fuse"}, decoder]})
    assert TokenTexts(lambda ids: "a" * len(ids), decoder, [0])[1] is None
