"""The shared parts of workloads: settings, distributions of lengths, and text of a given length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, log
from random import Random
from typing import Any, Final, Literal, Protocol

from draftgate.loadgen.planning.corpus import Library, TextCorpus, open_corpus
from draftgate.loadgen.types import ChatMessage, RequestSpec, Slo

CHARACTERS_PER_TOKEN: Final = 3.5
"""The ratio if the server cannot count tokens. English has about 4 characters per token in large
vocabularies, by the rule of thumb in OpenAI's documentation. The shipped model's vocabulary of
4,096 tokens has 3.1 on the sources of the standard library and 3.4 on its docstrings (240 and 142
passages of 2,000 characters, 2026-11-21)."""

PROMPT_SHARE: Final = 0.68
"""Share of the context that a prompt may fill after the response is subtracted. Token counts are
estimates, and a server rejects a request over its context. The densest long prompt of 2,400
requests of all workloads had 1.41 times its estimate. The estimate was measured with the shipped
model's tokenizer (2026-11-21). The product 0.68 x 1.41 = 0.96 leaves some tokens for a chat
template."""

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class TokenEstimator:
    """Estimates the tokens of a text without a tokenizer: ceil(characters / characters per token).

    Attributes:
        source: the origin of the ratio in words, which reports print next to prompt lengths.
    """

    characters_per_token: float = CHARACTERS_PER_TOKEN
    source: str = "estimated, not measured"

    def __post_init__(self) -> None:
        if not self.characters_per_token > 0:
            raise ValueError(f"characters per token must be positive: {self.characters_per_token}")

    @classmethod
    def measured(cls, samples: Sequence[tuple[str, int]]) -> TokenEstimator:
        """Return an estimator from (text, tokens) samples.

        Its ratio is that of all characters to all tokens. This ratio is right for the total of a
        load, unlike the mean of ratios.

        Raises:
            ValueError: the samples hold no characters or no tokens.
        """
        characters = sum(len(text) for text, _ in samples)
        tokens = sum(count for _, count in samples)
        if characters <= 0 or tokens <= 0:
            raise ValueError("the samples hold no text, so characters per token cannot be measured")
        return cls(characters / tokens, f"measured on {len(samples)} texts")

    def count(self, text: str) -> int:
        """Return the estimated tokens of a text, which never fall with its length."""
        return ceil(len(text) / self.characters_per_token)


def cut(text: str, tokens: int, counter: TokenEstimator) -> str:
    """Return the longest prefix of a text with at most that many tokens, by bisection."""
    lengths = range(len(text) + 1)
    fitting = bisect_right(lengths, tokens, key=lambda length: counter.count(text[:length]))
    return text[: max(fitting - 1, 0)]


class Workload(Protocol):
    """A sequence of requests that depends on no responses. Only a replayed trace ends."""

    @property
    def name(self) -> str:
        """The name that `--workload` takes."""
        ...

    def request(self, index: int) -> RequestSpec:
        """Return the request at a position from 0. The same settings give the same request.

        Requests may be built in any order. Building a request may read a document, which takes some
        milliseconds, so a run builds its plan before the clock starts.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """The settings of all workloads.

    Attributes:
        seed: the same seed on the same corpus gives the same requests.
        max_tokens: the limit of every response, or None to draw it from the workload's
            distribution.
        max_model_len: the server's context in tokens, which limits prompts and responses.
        slo: the SLO of the requests. The workload `mixed` gives its classes multiples of this SLO.
    """

    seed: int
    counter: TokenEstimator = TokenEstimator()
    corpus: TextCorpus = field(default_factory=open_corpus)
    max_tokens: int | None = None
    max_model_len: int | None = None
    slo: Slo = field(default_factory=Slo)

    def rng(self, *names: object) -> Random:
        """Return the random generator of that name, independent of all others."""
        return Random("/".join(map(str, (self.seed, *names))))

    def answer_tokens(self, drawn: int) -> int:
        """Return the limit of a response: at least 1, at most half the server's context."""
        tokens = drawn if self.max_tokens is None else self.max_tokens
        most = tokens if self.max_model_len is None else self.max_model_len // 2
        return max(min(tokens, most), 1)

    def prompt_tokens(self, drawn: int, answer_tokens: int, beside: int = 0) -> int:
        """Return the length of a prompt: at least 1, within the context that the response leaves.

        Args:
            beside: tokens of the prompt that are not part of the drawn length.
        """
        if self.max_model_len is None:
            return max(drawn, 1)
        most = int((self.max_model_len - answer_tokens) * PROMPT_SHARE) - beside
        return max(min(drawn, most), 1)

    def text(self, library: Library, rng: Random, tokens: int) -> str:
        """Return a passage of that many tokens from a random position."""
        position, characters = library.random_position(rng), 4 * tokens
        passage = library.read(position, characters)
        while self.counter.count(passage) < tokens:
            characters *= 2
            passage = library.read(position, characters)
        return cut(passage, tokens, self.counter)

    def spec(
        self,
        class_name: str,
        index: int,
        max_tokens: int,
        content: str | tuple[ChatMessage, ...],
        **fields: Any,
    ) -> RequestSpec:
        """Return a completion request for a prompt, or a chat request for messages."""
        prompt, messages = (content, ()) if isinstance(content, str) else (None, content)
        fields = {"class_name": class_name, "slo": self.slo, **fields}
        return RequestSpec(prompt, messages, max_tokens, self.seed + index, **fields)


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lognormal lengths in tokens, clamped to [least, most]. Sigma is of the natural logarithm."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: Random) -> int:
        """Return a random length."""
        length = round(rng.lognormvariate(log(self.median), self.sigma))
        return min(max(length, self.least), self.most)


class Shares:
    """Draws an index with a probability in proportion to its weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._ends = list(accumulate(weights))

    def draw(self, rng: Random) -> int:
        """Return a random index."""
        index = bisect_right(self._ends, rng.random() * self._ends[-1])
        return min(index, len(self._ends) - 1)


def zipf(count: int, exponent: float) -> Shares:
    """Return the shares of ranks 1 ... count, in proportion to rank^-exponent (Zipf, 1949)."""
    return Shares([rank**-exponent for rank in range(1, count + 1)])


def to_endpoint(request: RequestSpec, endpoint: Endpoint) -> RequestSpec:
    """Return a request in the form of an endpoint, for servers that lack the other endpoint.

    A prompt becomes the message of a user. A chat becomes a text of `Role: content` paragraphs that
    ends with `Assistant:`, so a later turn still begins with the earlier turns.
    """
    if endpoint == "chat" and request.prompt is not None:
        return replace(request, prompt=None, messages=(ChatMessage("user", request.prompt),))
    if endpoint == "completions" and request.prompt is None:
        transcript = "".join(f"{m.role.capitalize()}: {m.content}\n\n" for m in request.messages)
        return replace(request, prompt=f"{transcript}Assistant:", messages=())
    return request


def prompt_text(request: RequestSpec) -> str:
    """Return the whole text of a request, for counting its tokens."""
    if request.prompt is not None:
        return request.prompt
    return "\n".join(message.content for message in request.messages)
