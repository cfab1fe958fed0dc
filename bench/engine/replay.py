"""A proposer for benchmarks that knows the continuation and errs at a chosen rate.

The rest is real: the engine verifies each draft and samples each token. Results are labelled
`replay`.
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

NAME: Final = "replay"


@dataclass(slots=True)
class _Proposal:
    """The latest draft of a sequence, and its position."""

    behind: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Tested:
    """Counts of tested draft tokens, which are those with only correct tokens before them."""

    agreed: int = 0
    rejected: int = 0

    @property
    def acceptance(self) -> float | None:
        """The share of tested tokens that agreed; None if none were tested."""
        tested = self.agreed + self.rejected
        return self.agreed / tested if tested else None


@dataclass(slots=True)
class ReplayProposer:
    """Drafts the known continuation of each prompt, with a share of the tokens replaced.

    The wrong tokens are drawn once, independently for each position of each continuation. Each
    tested slot is therefore accepted with the chosen probability. Satisfies
    `backends.core.proposer.Proposer`.

    Attributes:
        tested: outcome of the drafts since it was last set.
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
        """Return the proposer of prompts and their continuations.

        Args:
            acceptance: probability that a token stays unchanged.
            vocab_size: size of the vocabulary that wrong tokens are drawn from.
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
        known = self.drafts.get(tuple(sequence.request.prompt_ids), ())
        made = sequence.output_tokens
        token_ids = known[made : made + request.max_tokens]
        if token_ids:
            self._latest[sequence.key] = _Proposal(len(sequence.token_ids), token_ids)
        return Draft(token_ids)

    def _judge(self, sequence: Sequence) -> None:
        """Compare the latest draft with the tokens generated since, verified or not."""
        latest = self._latest.pop(sequence.key, None)
        if latest is None:
            return
        came = sequence.token_ids[latest.behind :]
        for proposed, token in zip(latest.token_ids, came, strict=False):
            if proposed != token:
                self.tested.rejected += 1
                return
            self.tested.agreed += 1


def corrupted(
    tokens: Many[int], acceptance: float, vocab_size: int, rng: random.Random
) -> tuple[int, ...]:
    """Return the tokens, each replaced by another one with probability `1 - acceptance`."""
    return tuple(
        token if rng.random() < acceptance else (token + rng.randrange(1, vocab_size)) % vocab_size
        for token in tokens
    )
