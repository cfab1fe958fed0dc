"""Incremental detokenization."""

from __future__ import annotations

import itertools
from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.detokenize import TextStream
from draftgate.backends.tokenizer import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED_MODEL)


SPECIAL_IDS = range(4)
ALL_IDS = range(len(SPECIAL_IDS), tokenizer().vocab_size)
BYTE_IDS = [token for token in ALL_IDS if tokenizer().token_text(token) == "\ufffd"]
UNKNOWN = tokenizer().encode("\ufffd", add_special_tokens=False)
EMOJI = tokenizer().encode("🙂", add_special_tokens=False)
token_ids = st.lists(st.one_of(st.sampled_from(ALL_IDS), st.sampled_from(BYTE_IDS)), max_size=40)
texts = st.text(
    st.one_of(
        st.sampled_from("ab \n=:'"),
        st.sampled_from("é漢🙂👩🏽\u200d\ufffd"),
        st.characters(codec="utf-8"),
    ),
    max_size=30,
)
stops = st.lists(st.text(st.sampled_from("ab é🙂"), min_size=1, max_size=4), max_size=3).map(tuple)


def stream_pieces(ids, stop=(), context=()):
    """Return the pieces of text that a client receives, including the final flush."""
    stream = TextStream(tokenizer().decode, stop, context, alone=tokenizer().texts.__getitem__)
    return [*(stream.add(token) for token in ids), stream.flush()]


def cut_at_first_stop(text: str, stop: tuple[str, ...]) -> str:
    """Return the text before the first complete stop string.

    The longer stop string counts if two stop strings end together.
    """
    for end in range(1, len(text) + 1):
        found = [len(s) for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(found)]
    return text


def split_and_encode(text: str, cuts: list[int]) -> list[int]:
    """Tokenize parts of a text separately, which gives other tokens than the whole text."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    return [t for part in parts for t in tokenizer().encode(part, add_special_tokens=False)]


@given(token_ids)
@example(list(range(4, 260)))
@example([*UNKNOWN * 3, *EMOJI])
@example([*EMOJI[-1:] * 4, *EMOJI, *EMOJI[-1:] * 3, *EMOJI[:1]])
def test_streamed_text_equals_decoding_all_tokens(ids: list[int]) -> None:
    """Streaming any tokens gives the decoded text, even if their bytes form no character."""
    assert "".join(stream_pieces(ids)) == tokenizer().decode(ids)


@given(token_ids, stops)
@example(list(range(4, 260)), ())
@example([*UNKNOWN * 3, *EMOJI], ())
@example([*EMOJI[-1:] * 4, *EMOJI, *EMOJI[-1:] * 3, *EMOJI[:1]], ())
def test_single_token_texts_give_the_same_pieces_as_decoding(ids, stop) -> None:
    """A token's own text gives the same piece as decoding the token after its predecessors."""
    slow = TextStream(tokenizer().decode, stop)
    assert stream_pieces(ids, stop) == [*(slow.add(token) for token in ids), slow.flush()]


@given(texts, st.lists(st.integers(0, 100)), st.text("ab é\n", max_size=9))
def test_text_does_not_depend_on_tokenization(text, cuts, prompt) -> None:
    """The client receives the same text for any tokenization, also after a prompt."""
    ids = split_and_encode(text, cuts)
    context = tokenizer().encode(prompt)
    assert "".join(stream_pieces(ids, context=context)) == text


@given(texts.map(lambda t: t + "ab é🙂ab"), st.lists(st.integers(0, 100)), stops)
@example("xabcd", [2], ("abcd", "bc"))
@example("xabcd", [1, 2, 3, 4], ("abcd", "bc"))
@example("xaab", [2, 3], ("aab", "ab"))
@example("self", [], ("self", "el"))
def test_stop_strings_are_found_across_token_boundaries(text, cuts, stop) -> None:
    """The text ends before the first complete stop string for any tokenization, and the stream
    names this string."""
    stream = TextStream(tokenizer().decode, stop)
    pieces = [stream.add(token) for token in split_and_encode(text, cuts)]
    result = "".join(pieces) + stream.flush()
    assert result == cut_at_first_stop(text, stop)
    assert stream.stopped == bool(stream.stop_text)
    assert text.startswith(result + stream.stop_text)
    assert stream.stop_text in ("", *stop)


@given(texts, st.lists(st.integers(0, 100)), stops)
def test_the_stop_string_ends_the_text_if_it_is_included(text, cuts, stop) -> None:
    """With its stop string, the text ends there for any tokenization, and is never taken back."""
    stream = TextStream(tokenizer().decode, stop, include_stop=True)
    pieces = [stream.add(token) for token in split_and_encode(text, cuts)]
    pieces.append(stream.flush())
    assert "".join(pieces) == cut_at_first_stop(text, stop) + stream.stop_text
    assert text.startswith("".join(pieces))


@given(texts, st.lists(st.integers(0, 100)), stops)
def test_returned_text_is_never_taken_back(text, cuts, stop) -> None:
    """The text after each token is a prefix of the final text."""
    given_text = ""
    final = cut_at_first_stop(text, stop)
    for piece in stream_pieces(split_and_encode(text, cuts), stop):
        given_text += piece
        assert final.startswith(given_text)
    assert given_text == final


def test_text_is_returned_as_soon_as_it_is_certain() -> None:
    """The detokenizer holds whole characters back only if they may begin a stop string."""
    ids = tokenizer().encode("x = 1\ny", add_special_tokens=False)
    assert stream_pieces(ids)[-1] == ""
    stream = TextStream(tokenizer().decode, ("\n\n",))
    shown = "".join(stream.add(token) for token in ids[:-1])
    assert shown == "x = 1"
    assert stream.add(ids[-1]) == "\ny"


def test_incomplete_characters_are_held_back() -> None:
    """An emoji of several byte tokens appears when complete, or as U+FFFD at the end."""
    waiting = [""] * (len(EMOJI) - 1)
    assert len(EMOJI) > 1
    assert stream_pieces(EMOJI)[:-1] == [*waiting, "🙂"]
    assert stream_pieces(EMOJI[:-1]) == [*waiting, "\ufffd"]


def test_no_text_follows_a_stop_string() -> None:
    """Further tokens and the flush return no text after a stop string."""
    stream = TextStream(tokenizer().decode, ("b",))
    pieces = [stream.add(t) for t in tokenizer().encode("a b c", add_special_tokens=False)]
    assert stream.stopped
    assert "".join(pieces) == "a "
    assert stream.flush() == ""


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 4, 5])
def test_stop_string_before_min_tokens_is_text(min_tokens: int) -> None:
    """A stop string that is complete before `min_tokens` tokens is part of the text."""
    stream = TextStream(lambda ids: "".join(map(chr, ids)), ("b",), (), min_tokens)
    text = "".join(stream.add(ord(letter)) for letter in "abaab") + stream.flush()
    assert text == {0: "a", 1: "a", 3: "abaa", 4: "abaa", 5: "abaa"}[min_tokens]
    assert stream.stopped
