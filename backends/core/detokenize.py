"""Incremental detokenization: whole characters, and stop strings across token boundaries."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

_REPLACEMENT: Final = "\ufffd"
"""Output of decoders for bytes that are not (yet) a character."""

_CONTEXT_TOKENS: Final = 6
"""Number of tokens that are decoded again before the new tokens, because some decoders strip or
join text at the start."""

_LONGEST_CHARACTER_TOKENS: Final = 4
"""Maximum number of tokens in a character, because a UTF-8 character has at most 4 bytes."""


class TextStream:
    """Converts tokens into text incrementally.

    The stream holds text back while it may be part of a character or the beginning of a stop
    string. So returned text is final.

    Attributes:
        stopped: whether a stop string has ended the text.
        stop_text: this stop string, or empty.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: tuple[str, ...] = (),
        context: Sequence[int] = (),
        min_tokens: int = 0,
        alone: Callable[[int], str | None] = lambda _token: None,
        *,
        include_stop: bool = False,
    ) -> None:
        """Start after `context`, the prompt's tokens, of which only the last few matter.

        A stop string that is complete before `min_tokens` tokens is ordinary text.

        Args:
            decode: returns the text of tokens.
            alone: returns the text that a token adds after whole characters, or None if the text
                depends on the previous tokens.
            include_stop: whether the text includes the stop string that ends it.
        """
        self._decode = decode
        self._alone = alone
        self._stop = tuple(sorted([s for s in stop if s])) if stop else ()
        self._include_stop = include_stop
        most = _CONTEXT_TOKENS + _LONGEST_CHARACTER_TOKENS
        self._tokens = deque(context[-_CONTEXT_TOKENS:], maxlen=most)
        # Some decoders strip the start of a text, or drop text beside half a character.
        before = decode(list(self._tokens))
        self._is_whole = bool(before) and not before.endswith(_REPLACEMENT)
        # Number of leading characters already returned, or None for all of them.
        self._taken: int | None = None
        self._undecided = 0  # tokens since the text last ended with a whole character
        self._held = ""  # text that may be the beginning of a stop string
        self._before_stops = max(min_tokens - 1, 0)  # next tokens that cannot complete a stop
        self.stopped = False
        self.stop_text = ""

    def add(self, token_id: int) -> str:
        """Add a token and return the text that is now final, which is empty after a stop string."""
        if self.stopped:
            return ""
        new = self._alone(token_id) if self._is_whole and not self._undecided else None
        if new is None:
            new = self._new_text(token_id)
        else:
            self._tokens.append(token_id)
            self._taken = None
        if not self._stop:
            return new
        self._held += new
        if self._before_stops > 0:
            self._before_stops -= 1
        else:
            self._cut_at_stop()
        return self._release(final=False)

    def extend(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Add tokens up to the token that completes a stop string.

        Returns:
            The text that is now final, and the number of added tokens.
        """
        if len(token_ids) == 1:  # the usual case
            return self.add(token_ids[0]), 1
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            text += self.add(token_id)
            if self.stopped:
                return text, count
        return text, len(token_ids)

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        if self.stopped:
            return ""
        if self._taken is not None:
            self._held += self._decode(list(self._tokens))[self._taken :]
        if not self._held:
            return ""
        if self._stop:
            self._cut_at_stop()
        return self._release(final=True)

    def _new_text(self, token_id: int) -> str:
        """Add a token and return its new text, which is empty while a character is incomplete."""
        if self._taken is None:
            self._taken = self._settle(0)
        self._tokens.append(token_id)
        text = self._decode(list(self._tokens))
        open_tokens = 0
        if text.endswith(_REPLACEMENT):
            self._undecided += 1
            if self._undecided < _LONGEST_CHARACTER_TOKENS:
                return ""
            # These tokens form no character, and only the last few may still become part of one.
            open_tokens = _LONGEST_CHARACTER_TOKENS - 1
        else:
            self._undecided = 0
        end = self._decided_length(open_tokens) if open_tokens else len(text)
        new = text[self._taken : end]
        self._taken = self._settle(open_tokens)
        self._is_whole = self._is_whole or (bool(new) and not self._undecided)
        return new

    def _settle(self, open_tokens: int) -> int:
        """Drop all tokens but the context, and return the length of its decoded text."""
        while len(self._tokens) > _CONTEXT_TOKENS:
            self._tokens.popleft()
        return self._decided_length(open_tokens)

    def _decided_length(self, open_tokens: int) -> int:
        """Return the length of the text without the last `open_tokens` tokens."""
        tokens = list(self._tokens)
        return len(self._decode(tokens[: len(tokens) - open_tokens]))

    def _cut_at_stop(self) -> None:
        """Cut the held text at the first completed stop string.

        If two stop strings end together, the longer string counts. So the cut depends on the
        characters alone, not on their tokens.
        """
        found = [(self._held.find(stop), len(stop)) for stop in self._stop]
        ends = [(start + length, start) for start, length in found if start >= 0]
        if ends:
            end, start = min(ends)
            self.stop_text = self._held[start:end]
            self._held = self._held[: end if self._include_stop else start]
            self.stopped = True

    def _release(self, *, final: bool) -> str:
        keep = 0 if final or self.stopped else self._possible_stop()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _possible_stop(self) -> int:
        """Return the length of the longest tail that may become a stop string."""
        for length in range(min(len(self._held), max(map(len, self._stop), default=1) - 1), 0, -1):
            tail = self._held[-length:]
            # In order, the longer stop strings with this beginning are the next ones after it.
            place = bisect_right(self._stop, tail)
            if place < len(self._stop) and self._stop[place].startswith(tail):
                return length
        return 0
