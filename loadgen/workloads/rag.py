"""Workload `rag`: questions about a collection of passages.

A question is a flow of three requests under one deadline. The first request plans the search
queries. The second request embeds the queries to find passages. The third request responds to the
question from these passages. A question is one request with its passages in the prompt if no index
is available, as in a simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, Final, Protocol

from msgspec import DecodeError, Struct
from msgspec.json import decode

from draftgate.loadgen.types import ChatMessage, PlannedRequest, Record, RequestSpec, Slo
from draftgate.loadgen.workloads.base import Lengths, WorkloadSettings, cut, to_endpoint, zipf
from draftgate.loadgen.workloads.deadline import RequestWork, split_deadline

PASSAGES: Final = 5
PASSAGE_TOKENS: Final = 256
"""Passages per question, five as in Lewis et al. (NeurIPS 2020). Their passages have 100 words, but
today's retrievers return about 200 to 1,000 tokens."""

COLLECTION: Final = 4096
POPULARITY: Final = 0.8
"""Passages of the collection, and the Zipf exponent of their popularity. Web documents have
exponents of 0.64 to 0.83 (Breslau et al., INFOCOM 1999)."""

INDEXED: Final = 256
"""The most popular passages, which a server embeds before the run. These 65,000 tokens take 7 to 30
s on one core of an AMD EPYC Zen 4 with the shipped model (2026-11-21)."""

INDEXED_SEED: Final = 0
"""The indexed passages are the same for every seed of a load, so that the index is built once."""

DEADLINE_S: Final = 10.0
"""Default deadline, after which a dialogue loses the user's attention (Nielsen, Usability
Engineering, 1993)."""

BEGUN_TOKENS: Final = 12
"""Tokens of the passage that the question names, enough to find the passage."""

INSTRUCTION: Final = (
    "Answer the question from the passages below. Quote the sentence that your answer rests on, and"
    " name its passage. If the passages do not tell, say so.\n\n"
)
QUESTION_START: Final = "Question: what is said about"

ANSWER: Final = Lengths(median=129, sigma=0.86, least=16, most=601)
"""The distribution of the workload `chat`."""

MOST_QUERIES: Final = 2
QUERY_CHARACTERS: Final = 60
PLAN_TOKENS: Final = 96
"""Limit of a plan, for two full queries at two characters per token and their JSON."""

EXPECTED_PLAN_TOKENS: Final = 24
"""Length of a typical plan. The shipped model's plans had 11 to 25 tokens (six questions,
2026-11-21)."""

PLAN_INSTRUCTION: Final = (
    "Write one or two short queries by which a search engine finds what answers the question, as"
    ' JSON: {"queries": ["..."]}.\n\n'
)

PLAN_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["queries"],
    "additionalProperties": False,
    "properties": {
        "queries": {
            "type": "array",
            "minItems": 1,
            "maxItems": MOST_QUERIES,
            "items": {"type": "string", "maxLength": QUERY_CHARACTERS},
        }
    },
}
PLAN_FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN_SCHEMA}}


class Retriever(Protocol):
    """Finds passages of a collection and returns their positions, best first."""

    @property
    def passages(self) -> Sequence[str]:
        """The collection, the most popular passages first."""
        ...

    def nearest(self, vectors: Sequence[bytes], count: int) -> list[int]:
        """Return the passages nearest to any of the vectors (little-endian float32)."""
        ...

    def by_words(self, text: str, count: int) -> list[int]:
        """Return the passages that share the rarest words with a text."""
        ...


class Rag:
    """Questions, each about one passage, drawn by popularity.

    Requests share the instruction. Two requests share their first passage with a probability that
    depends on its popularity.
    """

    name = "rag"

    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings
        self._popularity = zipf(COLLECTION, POPULARITY)
        self._indexed = zipf(INDEXED, POPULARITY)
        self.passage: Callable[[int], str] = lru_cache(maxsize=COLLECTION)(self._write_passage)

    def request(self, index: int) -> RequestSpec:
        """Return a question as one request with its passages in the prompt."""
        settings = self._settings
        rng = settings.rng(self.name, index)
        answer = settings.answer_tokens(ANSWER.draw(rng))
        chosen: dict[int, None] = {}
        while len(chosen) < PASSAGES:
            chosen[self._popularity.draw(rng)] = None
        passages = self.fit([self.passage(one) for one in chosen], answer)
        subject = self._draw_subject(passages[rng.randrange(PASSAGES)], rng)
        return self._spec(index, answer, _prompt_over(passages, subject), settings.slo)

    def planned(self, index: int, at_s: float | None, retriever: Retriever) -> PlannedRequest:
        """Return the user's question, with the flow of requests that responds to it."""
        settings = self._settings
        rng = settings.rng(self.name, "asked", index)
        answer = settings.answer_tokens(ANSWER.draw(rng))
        about = min(self._indexed.draw(rng), len(retriever.passages) - 1)
        subject = self._draw_subject(retriever.passages[about], rng)
        slo = settings.slo
        if slo.latency_s is None:
            slo = replace(slo, latency_s=DEADLINE_S)
        request = self._spec(index, answer, _question(subject), slo)
        return PlannedRequest(index, at_s, request, RagFlow(self, retriever, about, subject))

    def fit(self, passages: Sequence[str], answer_tokens: int) -> list[str]:
        """Return passages cut to the server's context."""
        settings = self._settings
        question_tokens = self.count(INSTRUCTION + QUESTION_START) + BEGUN_TOKENS
        tokens = settings.prompt_tokens(
            PASSAGES * PASSAGE_TOKENS, answer_tokens, beside=question_tokens
        )
        each = max(tokens // PASSAGES, 1)
        return [cut(passage, each, settings.counter) for passage in passages]

    def count(self, text: str) -> int:
        """Return the estimated tokens of a text."""
        return self._settings.counter.count(text)

    def _draw_subject(self, passage: str, rng: Random) -> str:
        """Return random words of a passage, or its first words if the random words are blank."""
        start = passage.rfind(" ", 0, rng.randrange(len(passage))) + 1
        texts = (passage[start:], passage.lstrip())
        counter = self._settings.counter
        words = (" ".join(cut(text, BEGUN_TOKENS, counter).split()) for text in texts)
        return next(filter(None, words), "")

    def _spec(self, index: int, answer: int, content: str, slo: Slo) -> RequestSpec:
        messages = (ChatMessage("user", content),)
        return self._settings.spec(self.name, index, answer, messages, slo=slo)

    def _write_passage(self, passage: int) -> str:
        settings = self._settings
        rng = settings.rng(self.name, "passage", passage)
        return settings.text(settings.corpus.prose, rng, PASSAGE_TOKENS)


def indexed_passages(settings: WorkloadSettings) -> list[str]:
    """Return the passages of the index, the most popular first.

    The passages are the same for every seed.
    """
    rag = Rag(replace(settings, seed=INDEXED_SEED))
    return [rag.passage(index) for index in range(INDEXED)]


@dataclass(frozen=True, slots=True)
class RagFlow:
    """A flow that plans, retrieves and responds, even if a request on the way fails.

    Retrieval always searches for the subject, and also for the queries of a plan. It falls back to
    shared words if the server returned no vectors.

    Attributes:
        about: the position of the passage that the question is about and retrieval should find.
        subject: the words that the question names.
    """

    rag: Rag
    retriever: Retriever
    about: int
    subject: str

    def next(
        self, request: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec | None:
        hops = (self._plan, self._retrieve, self._answer)
        if len(answered) == len(hops):
            return None
        return hops[len(answered)](request, answered, elapsed_s)

    def _plan(self, request: RequestSpec, _: Sequence[Record], elapsed_s: float) -> RequestSpec:
        content = PLAN_INSTRUCTION + _question(self.subject)
        work = RequestWork(self.rag.count(content), EXPECTED_PLAN_TOKENS)
        later = (self._retrieval_work(), self._answer_work(request))
        slo = split_deadline(request.slo, elapsed_s, work, later)
        extra = (*request.extra, ("response_format", PLAN_FORMAT))
        return _chat(request, content, hop="plan", slo=slo, max_tokens=PLAN_TOKENS, extra=extra)

    def _retrieve(
        self, request: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec:
        texts = answered[0].texts
        queries = parse_queries(texts[0]) if texts else ()
        later = (self._answer_work(request),)
        return replace(
            request,
            prompt=None,
            messages=(),
            inputs=(self.subject, *queries),
            extra=(),
            slo=split_deadline(request.slo, elapsed_s, self._retrieval_work(), later),
            hop="retrieve",
            facts=(("plan_parsed", bool(queries)),),
        )

    def _answer(
        self, request: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec:
        vectors, retriever = answered[1].vectors, self.retriever
        if vectors:
            found = retriever.nearest(vectors, PASSAGES)
        else:
            found = retriever.by_words(self.subject, PASSAGES)
        passages = self.rag.fit([retriever.passages[i] for i in found], request.max_tokens)
        content = _prompt_over(passages, self.subject)
        work = RequestWork(self.rag.count(content), request.max_tokens)
        facts = (("passage_found", self.about in found), ("by_vectors", bool(vectors)))
        slo = split_deadline(request.slo, elapsed_s, work)
        return _chat(request, content, hop="answer", slo=slo, facts=facts)

    def _retrieval_work(self) -> RequestWork:
        queries = MOST_QUERIES * QUERY_CHARACTERS * "x"
        return RequestWork(self.rag.count(self.subject + queries))

    def _answer_work(self, request: RequestSpec) -> RequestWork:
        question_tokens = self.rag.count(INSTRUCTION + _question(self.subject))
        return RequestWork(PASSAGES * PASSAGE_TOKENS + question_tokens, request.max_tokens)


class _Plan(Struct):
    queries: list[str]


def parse_queries(text: str) -> tuple[str, ...]:
    """Return the queries of a plan, or nothing if the text is not a plan.

    A server that enforces no schema may return any text. A server that enforces the schema may stop
    at `max_tokens`.
    """
    try:
        plan = decode(text, type=_Plan)
    except DecodeError:
        return ()
    queries = (query.strip()[:QUERY_CHARACTERS] for query in plan.queries[:MOST_QUERIES])
    return tuple(query for query in queries if query)


def _question(subject: str) -> str:
    return f'{QUESTION_START} "{subject}"?'


def _prompt_over(passages: Sequence[str], subject: str) -> str:
    listed = "".join(f"[{n}] {text}\n\n" for n, text in enumerate(passages, 1))
    return f"{INSTRUCTION}{listed}{_question(subject)}"


def _chat(request: RequestSpec, content: str, **fields: Any) -> RequestSpec:
    """Return a hop at the endpoint of the planned request."""
    messages = (ChatMessage("user", content),)
    hop = replace(request, prompt=None, messages=messages, **fields)
    return hop if request.prompt is None else to_endpoint(hop, "completions")
