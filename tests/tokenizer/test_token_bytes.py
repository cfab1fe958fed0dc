"""Tests of the raw bytes of tokens, for all kinds of tokenizers."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> FastTokenizer:
    """Return a tokenizer as of GPT-2 and Llama 3, with special and added tokens."""
    vocab = {character: place for place, character in enumerate(ALPHABET)}
    vocab |= {"Ġa": 256, "ðŁ": 257}
    fast = FastTokenizer(models.BPE(vocab, [("Ġ", "a"), ("ð", "Ł")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<|end|>", special=True)])
    fast.add_tokens([AddedToken("日本 語", normalized=False)])
    return fast


def byte_fallback(*, strips: bool) -> FastTokenizer:
    """Return a tokenizer as of Llama 2, or of Gemma without a stripped space."""
    pieces = ["<unk>", "▁", "a", "é", "▁the", "日", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    fast = FastTokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    fast.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), fast.normalizer])
        parts.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(parts)
    fast.add_special_tokens([AddedToken("</s>", special=True)])
    return fast


KINDS = {
    "byte_level": byte_level,
    "llama2": lambda: byte_fallback(strips=True),
    "gemma": lambda: byte_fallback(strips=False),
}


@pytest.fixture(scope="module", params=[*KINDS, "shipped"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    """Return a tokenizer of each kind."""
    if request.param == "shipped":
        return Tokenizer(SHIPPED_MODEL)
    folder: Path = tmp_path_factory.mktemp(request.param)
    KINDS[request.param]().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@given(st.text() | st.text("a é日😀\u0301the\ufffd", max_size=30))
@example("x😀é日本 ok")
@example("日本 語<|end|></s>")
@example(" \u200d👨‍👩‍👧 a")
def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    """The bytes of the tokens of any text join to its UTF-8, and decode as the tokens do."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.bytes[token] for token in ids)
    # Tokenizers as of Llama 2 put a space before each text.
    assert joined in {text.encode(), b" " + text.encode()}


def test_part_of_a_character_has_its_bytes(tokenizer: Tokenizer) -> None:
    """Each byte of a character has its own name, which is its bytes in OpenAI's notation."""
    ids = tokenizer.encode("a\U0001f9ff", add_special_tokens=False)
    parts = [token for token in ids if b"\x9f" in tokenizer.bytes[token]]
    assert parts
    for token in parts:
        with pytest.raises(UnicodeDecodeError):
            tokenizer.bytes[token].decode()
        assert "\\x9f" in tokenizer.bytes.name(token)
        assert "\ufffd" in tokenizer.token_text(token)
    names = [tokenizer.bytes.name(token) for token in ids]
    assert len(set(names)) == len(set(ids))


def test_unused_id_has_no_bytes(tokenizer: Tokenizer) -> None:
    """An id without a token has no bytes and an empty name."""
    assert tokenizer.bytes[tokenizer.vocab_size + 7] == b""
    assert tokenizer.bytes.name(tokenizer.vocab_size + 7) == ""


def test_word_piece_has_the_space_before_a_word(tmp_path: Path) -> None:
    """A word of WordPiece has the space that decoding adds, and its continuations have none."""
    vocab = {"[UNK]": 0, "a": 1, "word": 2, "##ing": 3}
    fast = FastTokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece(prefix="##")
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.bytes[token] for token in (2, 3)] == [b" word", b"ing"]
