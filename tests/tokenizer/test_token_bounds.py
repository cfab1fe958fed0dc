"""Tests of the lower bound of tokens, which needs no tokenising."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.token_bounds import COMPOSED_BYTES, token_bound
from draftgate.backends.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text(
    "aeA\u0301\u0308\u1100\u1161\u11a8"
)


def byte_level(*normalizer: normalizers.Normalizer) -> FastTokenizer:
    """Return a byte-level tokenizer that merges `ab` and `abab`."""
    tokens = [*ALPHABET, "ab", "abab"]
    merges = [("a", "b"), ("ab", "ab")]
    fast = FastTokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer:
        fast.normalizer = normalizers.Sequence(list(normalizer))
    fast.add_special_tokens([AddedToken("<|end|>")])
    return fast


def sentencepiece() -> FastTokenizer:
    """Return a tokenizer with a fallback to bytes and spaces of three bytes."""
    tokens = [*BYTES, "a", "b", "▁", "ab", "▁ab"]
    merges = [("a", "b"), ("▁", "ab")]
    model = models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges, byte_fallback=True)
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return fast


LOSSLESS = {
    "byte-level": byte_level(),
    "composing": byte_level(normalizers.NFC()),
    "sentencepiece": sentencepiece(),
    "shipped": FastTokenizer.from_file(str(SHIPPED_MODEL / "tokenizer.json")),
}


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=TEXTS)
@example("abab" * 100)
@example("<|end|>" * 20)
@example(" ab" * 50)
@example("\u1100\u1161\u11a8" * 30)
@example(" " * 200)
def test_a_text_has_at_least_the_bound(kind: str, text: str) -> None:
    """Tokenising never gives fewer tokens than the bound."""
    fast = LOSSLESS[kind]
    bound = token_bound(fast, fast.get_vocab())
    assert bound is not None
    assert bound.least_tokens(text) <= len(fast.encode(text).ids)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_the_bound_grows_with_the_text(kind: str) -> None:
    """The bound of a long text is its bytes over the longest token."""
    fast = LOSSLESS[kind]
    bound = token_bound(fast, fast.get_vocab())
    assert bound is not None
    assert bound.least_tokens("x" * 8_000_000) == -(-8_000_000 // bound.token_bytes)
    assert bound.least_tokens("x" * 8_000_000) > 100_000


@given(text=TEXTS)
@example("\u1100\u1161\u11a8")
@example("\u2126\u0313\u0300\u0345")
def test_composition_shortens_a_text_by_the_stated_factor_at_most(text: str) -> None:
    """NFC shortens a text to no less than a third of its bytes."""
    composed = unicodedata.normalize("NFC", text)
    assert len(text.encode()) <= COMPOSED_BYTES * len(composed.encode())


def test_every_character_is_at_least_a_third_of_its_decomposition() -> None:
    """No character of Unicode is the composition of more than three times its bytes."""
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000:
            character = chr(code)
            parts = unicodedata.normalize("NFD", character)
            if unicodedata.normalize("NFC", parts) == character:
                assert len(parts.encode()) <= COMPOSED_BYTES * len(character.encode())


def lossy() -> dict[str, FastTokenizer]:
    """Return tokenizers whose tokens may omit parts of a text, by what omits them."""
    found = {
        "unknown": FastTokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)),
        "words": FastTokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
        "regex": byte_level(normalizers.Replace(Regex(" +"), " ")),
        "shorter": byte_level(normalizers.Replace("  ", " ")),
        "strip": byte_level(normalizers.Strip()),
        "compatibility": byte_level(normalizers.NFKC()),
        "split": byte_level(),
        "truncation": byte_level(),
        "added": byte_level(),
    }
    found["split"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )
    found["truncation"].enable_truncation(10)
    found["added"].add_special_tokens([AddedToken("<pad>", rstrip=True)])
    return found


@pytest.mark.parametrize("what", lossy())
def test_a_lossy_tokenizer_has_no_bound(what: str) -> None:
    """A tokenizer that may omit text has no bound, so the server tokenises every prompt."""
    fast = lossy()[what]
    assert token_bound(fast, fast.get_vocab()) is None


def test_a_tokenizer_without_bound_refuses_nothing(tmp_path: Path) -> None:
    """Without a bound, the least number of tokens is 0, and the beginning is the whole text."""
    lossy()["words"].save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.least_tokens("a" * 1000) == 0
    assert tokenizer.beginning("a" * 1000, 1) == "a" * 1000


@given(text=TEXTS, tokens=st.integers(1, 20))
def test_a_beginning_has_enough_tokens(text: str, tokens: int) -> None:
    """The beginning of a text has the requested number of tokens, or is the whole text."""
    found = SHIPPED.beginning(text, tokens)
    assert text.startswith(found)
    assert found == text or len(SHIPPED.encode(found)) >= tokens


SHIPPED = Tokenizer(SHIPPED_MODEL)
