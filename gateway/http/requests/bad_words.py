"""The parameter `bad_words`: texts that the output must not contain, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.errors import invalid
from draftgate.gateway.http.requests.limits import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS


def bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that the output must not contain.

    As in vLLM, a word is forbidden in the tokens of its own encoding, at the beginning of a text
    and after a space. Other tokenizations of the word remain possible. Empty words are ignored.

    Raises:
        InvalidRequest: the words are too many, or a word is too long.
    """
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"must have at most {MAX_BAD_WORDS} words, not {len(words)}")
    if any(len(word) > MAX_BAD_WORD_CHARACTERS for word in words):
        text = f"each word must have at most {MAX_BAD_WORD_CHARACTERS} characters"
        raise invalid("bad_words", text)
    found = dict[tuple[int, ...], None]()  # in the order of the words, without repetitions
    for word in filter(None, words):
        alone, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")
        )
        found[alone] = None
        if spaced[-len(alone) :] != alone:  # otherwise the first sequence forbids both
            found[spaced] = None
    return tuple(ids for ids in found if ids)
