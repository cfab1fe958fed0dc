"""A proposer for benchmarks that knows the continuation and errs at a chosen rate.

The engine still verifies each draft and samples each token. Results are labelled `replay`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Final

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.recording import Text

NAME: Final = "replay"


@dataclass(slots=True)
class _Proposal:
    """The latest draft of a sequence and its position."""

    position: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Tested:
    """Counts of tested draft tokens, which follow only correct tokens of their draft."""

    agreed: int = 0
    rejected: int = 0

    @property
    def acceptance(self) -> float | None:
        """Share of accepted tokens among tested tokens, or None without tested tokens."""
        tested = self.agreed + self.rejected
        return self.agreed / tested if tested else None


@dataclass(slots=True)
class ReplayProposer:
    """A proposer of the known continuation of each prompt, with a share of the tokens replaced.

    The wrong tokens are drawn once, independently for each position of each continuation. Each
    tested slot is therefore accepted with the chosen probability. The class implements
    `backends.core.proposer.Proposer`.

    Attributes:
        drafts: drafted continuation by prompt.
        tested: outcome of the drafts since the last reset.
    """

    drafts: dict[tuple[int, ...], tuple[int, ...]]
    tested: Tested = field(default_factory=Tested)
    _latest: dict[int, _Proposal] = field(default_factory=dict)  # by sequence key

    @classmethod
    def of(
        cls,
        continuations: Iterable[tuple[tuple[int, ...], Many[int]]],
        acceptance: float,
        vocab_size: int,
        seed: int = 0,
    ) -> ReplayProposer:
        """Return a proposer of prompts and their continuations.

        Args:
            acceptance: probability that a token stays unchanged.
            vocab_size: size of the vocabulary from which wrong tokens are drawn.
        """
        return cls(
            {
                prompt: corrupted(tokens, acceptance, vocab_size, random.Random(f"{seed} {index}"))
                for index, (prompt, tokens) in enumerate(continuations)
            }
        )

    def depth_s(self, sequences: int) -> float:
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> Many[Draft]:
        return [self._propose(request) for request in requests]

    def forget(self, sequence: Sequence) -> None:
        self._judge(sequence)

    def _propose(self, request: DraftRequest) -> Draft:
        sequence = request.sequence
        self._judge(sequence)
        prompt = tuple(sequence.request.prompt_ids)
        token_ids = self._tokens(prompt, sequence.output_tokens, request.max_tokens)
        if token_ids:
            self._latest[sequence.key] = _Proposal(len(sequence.token_ids), token_ids)
        return Draft(token_ids)

    def _tokens(self, prompt: tuple[int, ...], position: int, most: int) -> tuple[int, ...]:
        """Return the draft for a position of the output."""
        return self.drafts.get(prompt, ())[position : position + most]

    def _judge(self, sequence: Sequence) -> None:
        """Compare the latest draft with the tokens that the sequence has generated since."""
        latest = self._latest.pop(sequence.key, None)
        if latest is None:
            return
        generated = sequence.token_ids[latest.position :]
        for proposed, token in zip(latest.token_ids, generated, strict=False):
            if proposed != token:
                self.tested.rejected += 1
                return
            self.tested.agreed += 1


@dataclass(slots=True)
class RecordedProposer(ReplayProposer):
    """A proposer whose drafts have the lengths and the right tokens of recorded drafts.

    `drafts` has the true continuation of each prompt. The first wrong token of a draft and all
    tokens after it are different from the continuation.

    Attributes:
        name: the proposer in the recording.
        texts: the recorded text that each prompt replays.
        vocab_size: size of the vocabulary.
    """

    name: str = ""
    texts: dict[tuple[int, ...], Text] = field(default_factory=dict)
    vocab_size: int = 2

    def _tokens(self, prompt: tuple[int, ...], position: int, most: int) -> tuple[int, ...]:
        text = self.texts.get(prompt)
        if text is None:
            return ()
        guess = text.guess(self.name, position % text.length).first(most)
        known = self.drafts[prompt][position : position + guess.proposed]
        wrong = ((token + 1) % self.vocab_size for token in known[guess.agreed :])
        return (*known[: guess.agreed], *wrong)


def corrupted(
    tokens: Many[int], acceptance: float, vocab_size: int, rng: random.Random
) -> tuple[int, ...]:
    """Replace each token by a different token with probability `1 - acceptance`."""
    return tuple(
        token if rng.random() < acceptance else (token + rng.randrange(1, vocab_size)) % vocab_size
        for token in tokens
    )
