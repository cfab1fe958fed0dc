"""The output of a stream during a move, while its source and its destination both run it.

In an exact numerics class, both workers compute the same tokens. The destination begins at an
earlier position, and gets the tokens that the source has added since then as drafts, which it
verifies in one step. The client first gets the output of the source, with which the output of the
destination is compared. After the switch, the client gets the output of the destination. Tokens and
text are functions of the position, so the switch may be inside a delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from draftgate.backends.types import Delta, GenerationRequest, Phases, TokenLogprob
from draftgate.policies.values import replace


class Splice:
    """The outputs of the source and the destination since the beginning of the destination.

    Attributes:
        differs: whether the destination has computed another output than the source.
    """

    def __init__(self, choices: Iterable[int]) -> None:
        self._choices = {choice: _Choice() for choice in choices}
        self.differs = False

    @property
    def verified_tokens(self) -> int:
        """Number of tokens of the source that the destination has computed too."""
        return sum(choice.verified_tokens for choice in self._choices.values())

    @property
    def caught_up(self) -> bool:
        """Whether the destination has computed all tokens of the choices that have not ended."""
        return all(one.source.ended or one.caught_up for one in self._choices.values())

    @property
    def source_tokens(self) -> int:
        """Number of tokens that the source has added."""
        return sum(len(choice.source.token_ids) for choice in self._choices.values())

    def with_drafts(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request with the tokens of the source as drafts, without choices that ended.

        Args:
            request: the request for the rest of the output at the beginning.
        """
        pairs = [(choice, self._choices[choice.choice].source) for choice in request.choices]
        resumed = [
            replace(choice, next_ids=tuple(source.token_ids))
            for choice, source in pairs
            if not source.ended
        ]
        return replace(request, resumed=tuple(resumed))

    def add_source(self, delta: Delta) -> None:
        """Add a delta that the client gets."""
        choice = self._choices[delta.choice]
        choice.source.add(delta)
        self.differs = self.differs or not choice.verify()

    def add_sink(self, delta: Delta) -> None:
        """Add a delta of the destination."""
        choice = self._choices[delta.choice]
        choice.sink.add(delta)
        choice.last = delta
        choice.phases = choice.phases or delta.phases
        self.differs = self.differs or not choice.verify()

    def continued(self, take: Callable[[Delta], None]) -> Callable[[Delta], None]:
        """Pass on what the destination has added to the output of the source.

        Args:
            take: gets the deltas of the choices that the source has not ended.

        Returns:
            A function for the further deltas of the destination, which passes them to `take`.
        """
        left = {number for number, one in self._choices.items() if not one.source.ended}

        def pass_on(delta: Delta) -> None:
            if delta.choice in left:
                if delta.finish_reason is not None:
                    left.remove(delta.choice)
                take(delta)

        for delta in self._surplus():
            pass_on(delta)
        return pass_on

    def _surplus(self) -> list[Delta]:
        found = [choice.surplus() for choice in self._choices.values()]
        return [delta for delta in found if delta is not None]


class _Output:
    """What a worker has added to a choice."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.drafts: list[tuple[int, int]] = []
        self.ended = False

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.drafts += delta.drafts
        self.ended = delta.finish_reason is not None


def _is_pair(tokens: tuple[int, int]) -> bool:
    return tokens[0] == tokens[1]


class _Choice:
    """The outputs of both workers for one choice.

    Attributes:
        verified_tokens: number of leading tokens that are equal in both.
        last: the last delta of the destination.
        phases: the phases of the destination, once known.
    """

    def __init__(self) -> None:
        self.source, self.sink = _Output(), _Output()
        self.verified_tokens = self._verified_chars = 0
        self.last: Delta | None = None
        self.phases: Phases | None = None

    @property
    def caught_up(self) -> bool:
        return len(self.sink.token_ids) >= len(self.source.token_ids)

    def verify(self) -> bool:
        """Compare what both workers have added, and return whether it is equal."""
        one, other = self.source, self.sink
        tokens = slice(self.verified_tokens, min(len(one.token_ids), len(other.token_ids)))
        chars = slice(self._verified_chars, min(len(one.text), len(other.text)))
        pairs = zip(one.token_ids[tokens], other.token_ids[tokens], strict=True)
        self.verified_tokens += sum(1 for _ in takewhile(_is_pair, pairs))
        self._verified_chars = chars.stop
        return (
            self.verified_tokens == tokens.stop
            and one.logprobs[tokens] == other.logprobs[tokens]
            and one.text[chars] == other.text[chars]
        )

    def surplus(self) -> Delta | None:
        """Return what the destination has added to the output of the source, if it has begun."""
        if self.last is None:
            return None
        tokens = len(self.source.token_ids)
        return self.last._replace(
            token_ids=tuple(self.sink.token_ids[tokens:]),
            text=self.sink.text[len(self.source.text) :],
            logprobs=tuple(self.sink.logprobs[tokens:]),
            phases=self.phases,
            drafts=tuple(self.sink.drafts),
        )
