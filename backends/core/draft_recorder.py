"""Recording of what proposers would draft at every output position of sampled requests.

The text of a request does not depend on its drafts (coupled verification), so the recorder need not
take part in decoding. It reads the delivered tokens, and drafts on its own copies of the sequences.
A recording is therefore the same for any speculation policy, batch and draft length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Final

from draftgate.backends.core.draft_scores import GRAMMAR
from draftgate.backends.core.drafting import legal_draft
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.grammar import Grammars
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.recording import SLOTS, Columns, Guess, Text
from draftgate.backends.types import Delta, GenerationRequest, ResumedChoice, Task

TASK: Final = "served"
"""The task of texts that were recorded while serving."""


@dataclass(slots=True)
class _RecordedSequence:
    """The recorder's copy of a sequence, which grows by one token at a time.

    Attributes:
        index: number of the text in the recording.
        sequence: the tokens that have been drafted for.
        ahead: delivered tokens that are not in `sequence` yet.
        drafted: number of output positions with drafts.
        open: drafts whose tokens are not all known yet, by proposer, oldest first.
        guesses: completed drafts from the first output position on, by proposer.
    """

    index: int
    sequence: Sequence
    ahead: deque[int]
    open: dict[str, deque[Draft]]
    guesses: dict[str, list[Guess]]
    drafted: int = 0
    has_ended: bool = False

    @property
    def needs_drafts(self) -> bool:
        """Whether the next position has a token, or may still get one, but no drafts."""
        is_new = self.drafted == self.sequence.output_tokens
        return is_new and (not self.has_ended or bool(self.ahead))

    def extend(self) -> None:
        """Move the next token to the sequence."""
        token = self.ahead.popleft()
        self.sequence.token_ids.append(token)
        if self.sequence.grammar is not None:
            self.sequence.grammar.accept(token)

    def settle(self) -> None:
        """Compare the drafts with the text as far as the text is known."""
        tokens, first = self.sequence.token_ids, self.sequence.prompt_tokens
        known = self.sequence.output_tokens - (0 if self.has_ended else SLOTS)
        for name, drafts in self.open.items():
            guesses = self.guesses[name]
            while drafts and len(guesses) < known:
                at = first + len(guesses)
                guesses.append(Guess.from_draft(drafts.popleft(), tokens[at : at + SLOTS]))


class DraftRecorder:
    """Records drafts for a share of all requests. The object is not thread-safe."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        share: float = 1.0,
        *,
        tenants: bool = False,
        first_index: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        """Start without a request.

        Args:
            proposers: proposers to record, by name. They must read only the tokens of a sequence,
                because the recorder's copies have no KV cache.
            share: share of the requests to record, 0 to 1.
            tenants: whether texts name the tenants of their requests.
            first_index: index of the first recorded text.
            grammars: compiles the grammars of requests, or None to leave out such requests. A
                worker calls no proposer where a grammar forces tokens, so a text with a grammar
                records the forced tokens beside the drafts, as `GRAMMAR`.
        """
        self._grammars = grammars
        self._proposers = proposers
        self._limit = share * 2.0**64
        self._tenants = tenants
        self._indexes = count(first_index)
        self._open: dict[str, dict[int, _RecordedSequence]] = {}  # by request id, then choice

    def samples(self, request: GenerationRequest) -> bool:
        """Return whether to record a request, which depends on its id alone.

        Embeddings have no output.
        """
        digest = blake2b(request.request_id.encode(), digest_size=8).digest()
        is_text = request.task is Task.GENERATE
        if request.grammar is not None and self._grammars is None:
            return False
        return is_text and int.from_bytes(digest, "little") < self._limit

    def begin(self, request: GenerationRequest) -> None:
        """Record a new request if it is sampled."""
        if self.samples(request):
            self._open[request.request_id] = {
                choice.choice: self._copy(request, choice) for choice in request.choices
            }

    def cancel(self, request_id: str) -> list[Text]:
        """End a request without a result, and return its texts so far.

        The last position of a text has the drafts for a token that was never known.
        """
        copies = list(self._open.pop(request_id, {}).values())
        for copy in copies:
            copy.has_ended = True
            copy.settle()
            for name, drafts in copy.open.items():
                copy.guesses[name] += [Guess.from_draft(draft, ()) for draft in drafts]
            self._forget(copy)
        return [self._text(copy) for copy in copies if copy.sequence.output_tokens]

    def cancel_all(self) -> list[Text]:
        """End all open requests, and return their texts so far."""
        return [text for request_id in tuple(self._open) for text in self.cancel(request_id)]

    def observe(self, deltas: Iterable[tuple[str, Delta]]) -> list[Text]:
        """Record the positions of a step's tokens, and return the texts that have ended."""
        changed: list[_RecordedSequence] = []
        for request_id, delta in deltas if self._open else ():
            copy = self._open.get(request_id, {}).get(delta.choice)
            if copy is not None:
                copy.ahead.extend(delta.token_ids)
                copy.has_ended = delta.finish_reason is not None
                changed.append(copy)
                if copy.has_ended:
                    self._close(request_id, delta.choice)
        self._advance(changed)
        for copy in changed:
            copy.settle()
        ended = [copy for copy in changed if copy.has_ended]
        for copy in ended:
            self._forget(copy)
        return [self._text(copy) for copy in ended if copy.sequence.output_tokens]

    def _copy(self, request: GenerationRequest, choice: ResumedChoice) -> _RecordedSequence:
        index, names = next(self._indexes), tuple(self._proposers)
        # Negative keys never equal those of the worker's own sequences.
        sequence = Sequence.for_choice(-1 - index, request, ResumedChoice(choice.choice, ()))
        if request.grammar is not None and self._grammars is not None:
            sequence.grammar = self._grammars.start(request.grammar)
            names = (*names, GRAMMAR)
        return _RecordedSequence(
            index,
            sequence,
            deque(choice.output_ids),
            {name: deque() for name in names},
            {name: [] for name in names},
        )

    def _advance(self, copies: list[_RecordedSequence]) -> None:
        """Draft at every position up to the end of each text, in batches."""
        while copies:
            self._draft([copy for copy in copies if copy.needs_drafts])
            copies = [copy for copy in copies if copy.ahead]
            for copy in copies:
                copy.extend()

    def _draft(self, copies: list[_RecordedSequence]) -> None:
        requests = [DraftRequest(copy.sequence, SLOTS) for copy in copies]
        for name, proposer in self._proposers.items():
            for copy, draft in zip(copies, _drafts(proposer, requests), strict=True):
                copy.open[name].append(legal_draft(copy.sequence, draft.first(SLOTS)))
        for copy in copies:
            copy.drafted += 1
            if copy.sequence.grammar is not None:
                copy.open[GRAMMAR].append(Draft(copy.sequence.grammar.forced(SLOTS)))

    def _close(self, request_id: str, choice: int) -> None:
        """Stop observing a choice, and its request after the last choice."""
        del self._open[request_id][choice]
        if not self._open[request_id]:
            del self._open[request_id]

    def _forget(self, copy: _RecordedSequence) -> None:
        for proposer in self._proposers.values():
            proposer.forget(copy.sequence)

    def _text(self, copy: _RecordedSequence) -> Text:
        request = copy.sequence.request
        return Text(
            TASK,
            request.sampling.temperature,
            copy.index,
            {name: Columns.from_guesses(guesses) for name, guesses in copy.guesses.items()},
            tenant=request.tenant if self._tenants else "",
        )


def _drafts(proposer: Proposer, requests: Many[DraftRequest]) -> list[Draft]:
    """Return one draft per request.

    A draft model reads a long prompt in several calls, and proposes nothing before the last.
    """
    drafts = [Draft()] * len(requests)
    missing = list(range(len(requests)))
    while missing:
        read = [requests[place].sequence.draft_table.valid_tokens for place in missing]
        proposed = proposer.propose([requests[place] for place in missing])
        for place, draft in zip(missing, proposed, strict=True):
            drafts[place] = draft
        progressed = any(
            requests[place].sequence.draft_table.valid_tokens > tokens and not drafts[place]
            for place, tokens in zip(missing, read, strict=True)
        )
        missing = [place for place in missing if not drafts[place]] if progressed else []
    return drafts
