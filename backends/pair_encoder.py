"""The encoding of pairs of texts, as cross-encoders read them."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Encoding, Tokenizer


class TextPair(NamedTuple):
    """The tokens of a pair.

    Attributes:
        token_ids: both texts with the special tokens of the model.
        second_segment: index of the first token of the second segment, or 0 if the model does not
            get the types of tokens.
    """

    token_ids: list[int]
    second_segment: int


class PairEncoder:
    """Encodes pairs of one first text with many second texts. The object is thread-safe.

    Attributes:
        first_tokens: tokens of the first text, without special tokens.
        room_tokens: tokens that a second text can have, which is 0 or less if the first text is too
            long.
    """

    def __init__(
        self, fast: Tokenizer, first: str, max_tokens: int, *, marks_segments: bool = True
    ) -> None:
        """Encode the first text.

        Args:
            fast: a tokenizer that neither truncates nor pads.
            max_tokens: maximum tokens of a pair, including special tokens.
            marks_segments: whether the model gets the types of tokens.
        """
        self._fast = fast
        self._marks_segments = marks_segments
        self._first = self._encoded(first)
        self.first_tokens = len(self._first.ids)
        special = fast.num_special_tokens_to_add(is_pair=True)
        self.room_tokens = max_tokens - special - self.first_tokens

    def encode(self, second: str, max_tokens: int | None = None) -> TextPair:
        """Return the pair with a second text, whose end is cut off to fit.

        Args:
            max_tokens: maximum tokens of the second text, or None for as many as fit.
        """
        encoded = self._encoded(second)
        room = self.room_tokens if max_tokens is None else min(max_tokens, self.room_tokens)
        encoded.truncate(room)
        pair = self._fast.post_process(self._first, encoded)
        types: list[int] = pair.type_ids if self._marks_segments else []
        return TextPair(pair.ids, types.index(1) if 1 in types else 0)

    def _encoded(self, text: str) -> Encoding:
        # As a batch, because encoding a single text does not release the GIL.
        (found,) = self._fast.encode_batch_fast([text], add_special_tokens=False)
        return found
