"""What every workload builds on: its setting, distributions of lengths, text of a wanted length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import log
from random import Random
from typing import Final, Literal, Protocol

from draftgate.loadgen.planning.corpus import Library, TextCorpus
from draftgate.loadgen.types import ChatMessage, RequestSpec, Slo
from draftgate.loadgen.workloads.tokens import TokenCounter, cut

PROMPT_SHARE: Final = 0.68
"""Of the context left beside the answer, what a prompt may fill by the counter: counts are
estimates, and a request over the limit is refused. Of 2,400 questions of all workloads the densest
long prompt had 1.41 times its estimate by the shipped model's tokenizer, where that estimate was
measured (2026-11-21): 0.68 x 1.41 = 0.96, and a chat's template needs some tokens more."""

Endpoint = Literal["chat", "completions"]


class Workload(Protocol):
    """A sequence of questions without end (a replayed trace ends), in no need of answers."""

    @property
    def name(self) -> str:
        """Its name in the contract."""
        ...

    def request(self, index: int) -> RequestSpec:
        """Return the question at a place from 0: one setting, one index, one question.

        May be asked in any order. Reads documents when first met (milliseconds each), so a live
        run asks for its whole plan before the clock starts.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """What all workloads are given.

    Attributes:
        max_tokens: every answer's limit; None draws it from the workload's distribution.
        max_model_len: tokens the server holds per sequence, prompt and answer; None knows none.
        slo: what requests are promised.
    """

    seed: int
    counter: TokenCounter
    corpus: TextCorpus
    max_tokens: int | None
    max_model_len: int | None
    slo: Slo

    def rng(self, *names: object) -> Random:
        """Return the generator of that name: independent of every other name's."""
        return Random("/".join(map(str, (self.seed, *names))))

    def answer_tokens(self, drawn: int) -> int:
        """Return an answer's limit: at least 1, at most half the server's context."""
        tokens = drawn if self.max_tokens is None else self.max_tokens
        most = tokens if self.max_model_len is None else self.max_model_len // 2
        return max(min(tokens, most), 1)

    def prompt_tokens(self, drawn: int, answer_tokens: int, beside: int = 0) -> int:
        """Return a prompt's length: at least 1, and what fits with the answer and `beside`."""
        if self.max_model_len is None:
            return max(drawn, 1)
        most = int((self.max_model_len - answer_tokens) * PROMPT_SHARE) - beside
        return max(min(drawn, most), 1)

    def text(self, library: Library, rng: Random, tokens: int) -> str:
        """Return a passage of that many tokens from a place drawn by `rng`."""
        place, characters = library.place(rng), 4 * tokens
        passage = library.read(place, characters)
        while self.counter.count(passage) < tokens:
            characters *= 2
            passage = library.read(place, characters)
        return cut(passage, tokens, self.counter)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths in tokens, clamped to [least, most]; sigma is of the natural logarithm."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: Random) -> int:
        """Return a length."""
        length = round(rng.lognormvariate(log(self.median), self.sigma))
        return min(max(length, self.least), self.most)


class Shares:
    """Draws a place from 0 with the probability of its weight over their sum."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._ends = list(accumulate(weights))

    def draw(self, rng: Random) -> int:
        """Return a place."""
        place = bisect_right(self._ends, rng.random() * self._ends[-1])
        return min(place, len(self._ends) - 1)


def zipf(count: int, exponent: float) -> Shares:
    """Return the shares of ranks 1 ... count, in proportion to rank^-exponent (Zipf, 1949)."""
    return Shares([rank**-exponent for rank in range(1, count + 1)])


def through(question: RequestSpec, endpoint: Endpoint) -> RequestSpec:
    """Return the question as asked at that endpoint, for servers that have only one of the two.

    A prompt becomes the one message of a user. A chat becomes a text of `Role: content` paragraphs
    which ends with `Assistant:`; turns still begin with the turns before them.
    """
    if endpoint == "chat" and question.prompt is not None:
        return replace(question, prompt=None, messages=(ChatMessage("user", question.prompt),))
    if endpoint == "completions" and question.prompt is None:
        said = "".join(f"{m.role.capitalize()}: {m.content}\n\n" for m in question.messages)
        return replace(question, prompt=f"{said}Assistant:", messages=())
    return question


def prompt_text(question: RequestSpec) -> str:
    """Return everything a question says, to count its tokens by."""
    if question.prompt is not None:
        return question.prompt
    return "\n".join(message.content for message in question.messages)
