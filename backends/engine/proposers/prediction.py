"""Drafts from the output that a client predicts (OpenAI's Predicted Outputs).

An output mostly follows its prediction, apart from a few edits. The proposer therefore keeps a
place in the prediction that moves with the output, so repeated lines are not ambiguous. After a
difference, it searches the prediction for the last tokens of the output.

The prediction is no further text of the n-gram index for two reasons. A match in it is stronger
evidence than a match of equal length in the prompt, so the survivals are learned separately. The
usage of a request reports how many tokens of the prediction were accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Final

from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.proposers.ngram_lookup import LONG_MATCH, MAX_EVIDENCE

SEARCHED_LENGTHS: Final = (LONG_MATCH, 2, 1)
"""Lengths of the matches to search for, in this order.

The first is a long match of the n-gram lookup, and the others are those that its index finds.
"""

_CHARACTERS: Final = 0x110000


def _characters(token_ids: Iterable[int]) -> str:
    """Return one character per token, because searches in a `str` run in C.

    Tokens of a vocabulary with more than 1.1 million tokens may share a character. The drafts are
    tokens of the prediction anyway, so such a mistake costs a rejected draft.
    """
    return "".join([chr(token % _CHARACTERS) for token in token_ids])


class _Place:
    """The place in a prediction that an output has reached."""

    def __init__(self, prediction_ids: tuple[int, ...], read_tokens: int) -> None:
        """Start at the beginning of the prediction.

        Args:
            read_tokens: length of the prompt.
        """
        self._ids = prediction_ids
        self._text = _characters(prediction_ids)
        self._read = read_tokens
        self._next = 0  # index in the prediction of the next token, if the place is known
        self._known = True
        self._matched = 0  # number of tokens before `_next` that equal the end of the output
        self._certain = 0  # the last `_next` after a long match

    def follow(self, sequence: Sequence) -> None:
        """Move past the new tokens of the output."""
        tokens = sequence.token_ids
        new = _characters(tokens[self._read :])
        self._read = len(tokens)
        if self._known and self._text.startswith(new, self._next):
            self._next += len(new)
            self._matched = min(self._matched + len(new), MAX_EVIDENCE)
        elif new:
            begin = max(sequence.prompt_tokens, len(tokens) - MAX_EVIDENCE)
            self._search(_characters(tokens[begin:]))
        if self._known and self._matched >= LONG_MATCH:
            self._certain = self._next

    def _search(self, end: str) -> None:
        """Find the place after the last tokens of the output."""
        self._known = False
        for length in SEARCHED_LENGTHS:
            if length > len(end):
                continue
            wanted = end[-length:]
            # Most edits keep the order of the text, so the next match is likelier than earlier
            # ones. A short match may be a coincidence, so the search starts at a certain place.
            found = self._text.find(wanted, self._certain)
            if found < 0:
                found = self._text.find(wanted)
            if found >= 0:
                self._next, self._known = found + length, True
                self._matched = self._match_length(end)
                return

    def _match_length(self, end: str) -> int:
        before = self._text[max(0, self._next - len(end)) : self._next]
        length = 0
        for ours, theirs in zip(reversed(end), reversed(before), strict=False):
            if ours != theirs:
                break
            length += 1
        return length

    def draft(self, max_tokens: int) -> Draft:
        """Return the next tokens of the prediction, which are empty at its end."""
        found = self._ids[self._next : self._next + max_tokens] if self._known else ()
        return Draft(found, evidence=self._matched) if found else NO_DRAFT


class PredictionProposer:
    """Proposes the continuation of a prediction. The proposer is named `PREDICTION`."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}  # by sequence key

    def depth_s(self, sequences: int) -> float:
        """Return 0, because a lookup needs no forward pass."""
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0, because reading new tokens takes microseconds."""
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return the continuation of each sequence's prediction.

        Without a prediction, or if the output is not found in it, the draft is empty.
        """
        return [self._draft(request.sequence, request.max_tokens) for request in requests]

    def _draft(self, sequence: Sequence, max_tokens: int) -> Draft:
        place = self._places.get(sequence.key)
        if place is None:
            place = _Place(sequence.request.prediction_ids, sequence.prompt_tokens)
            self._places[sequence.key] = place
        place.follow(sequence)
        return place.draft(max_tokens)

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's place."""
        self._places.pop(sequence.key, None)
