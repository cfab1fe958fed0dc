"""rag: a question about a collection of passages.

A user's question is three requests under one deadline: a plan says what to search for, embeddings
of that find passages, and an answer is written over them. A simulator has no embeddings: there, and
where no index is given, the question is one request with its passages at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, Final, Protocol

from draftgate.loadgen.types import ChatMessage, PlannedRequest, Record, RequestSpec, Slo
from draftgate.loadgen.workloads import planner
from draftgate.loadgen.workloads.base import Lengths, WorkloadSettings, through, zipf
from draftgate.loadgen.workloads.deadline import Work, announced
from draftgate.loadgen.workloads.tokens import cut

PASSAGES: Final = 5
PASSAGE_TOKENS: Final = 256
"""Five passages retrieved, as in Lewis et al. (NeurIPS 2020); theirs have 100 words, today's
retrievers give some 200 to 1,000 tokens."""

COLLECTION: Final = 4096
POPULARITY: Final = 0.8
"""Passages that can be retrieved, and the Zipf exponent of how often each is: web documents have
0.64 to 0.83 (Breslau et al., INFOCOM 1999)."""

INDEXED: Final = 256
"""Of them the most popular, which are embedded where there is a server: 65,000 tokens, 7 to 30 s
on one core of an AMD EPYC Zen 4 with the shipped model (2026-11-21)."""

INDEXED_SEED: Final = 0
"""Those passages are the same for every seed of a load: an index is built once."""

DEADLINE_S: Final = 10.0
"""Of a question, where none is set: the limit for keeping the attention on a dialogue (Nielsen,
Usability Engineering, 1993)."""

BEGUN_TOKENS: Final = 12
"""Words of the passage that the question names: enough to find it by."""

INSTRUCTION: Final = (
    "Answer the question from the passages below. Quote the sentence that your answer rests on, and"
    " name its passage. If the passages do not tell, say so.\n\n"
)

ASKED: Final = "Question: what is said about"

ANSWER: Final = Lengths(median=129, sigma=0.86, least=16, most=601)
"""As in chat."""

PLAN, RETRIEVE, FINAL = "plan", "retrieve", "answer"


class Retriever(Protocol):
    """Finds passages of a collection by their places in it, best first."""

    @property
    def passages(self) -> Sequence[str]:
        """The collection, the most popular first."""
        ...

    def nearest(self, vectors: Sequence[bytes], count: int) -> list[int]:
        """Return the passages nearest to any of the vectors (little-endian float32)."""
        ...

    def by_words(self, text: str, count: int) -> list[int]:
        """Return the passages that share the rarest words with a text: without vectors."""
        ...


class Rag:
    """Questions, each about one passage, which is drawn by its popularity.

    Requests share the instruction, and a first passage as often as it is popular.
    """

    name = "rag"

    def __init__(self, setting: WorkloadSettings) -> None:
        self._setting = setting
        self._popularity = zipf(COLLECTION, POPULARITY)
        self._indexed = zipf(INDEXED, POPULARITY)
        self.passage: Callable[[int], str] = lru_cache(maxsize=COLLECTION)(self._written)

    def request(self, index: int) -> RequestSpec:
        """Return a question as one request, with its passages at hand."""
        rng = self._setting.rng(self.name, index)
        answer = self._setting.answer_tokens(ANSWER.draw(rng))
        chosen: dict[int, None] = {}
        while len(chosen) < PASSAGES:
            chosen[self._popularity.draw(rng)] = None
        passages = self.fitting([self.passage(one) for one in chosen], answer)
        subject = self._subject(passages[rng.randrange(PASSAGES)], rng)
        return self._question(index, answer, _over(passages, subject), self._setting.slo)

    def planned(self, index: int, at_s: float | None, retriever: Retriever) -> PlannedRequest:
        """Return a question as its user asks it, and the flow that answers it."""
        setting = self._setting
        rng = setting.rng(self.name, "asked", index)
        answer = setting.answer_tokens(ANSWER.draw(rng))
        about = min(self._indexed.draw(rng), len(retriever.passages) - 1)
        subject = self._subject(retriever.passages[about], rng)
        slo = setting.slo
        if slo.latency_s is None:
            slo = replace(slo, latency_s=DEADLINE_S)
        question = self._question(index, answer, _asked(subject), slo)
        return PlannedRequest(index, at_s, question, RagFlow(self, retriever, about, subject))

    def fitting(self, passages: Sequence[str], answer_tokens: int) -> list[str]:
        """Return passages cut to what the server's context holds of them beside the answer."""
        setting = self._setting
        asking = setting.counter.count(INSTRUCTION + ASKED) + BEGUN_TOKENS
        room = setting.prompt_tokens(PASSAGES * PASSAGE_TOKENS, answer_tokens, beside=asking)
        each = max(room // PASSAGES, 1)
        return [cut(passage, each, setting.counter) for passage in passages]

    def count(self, text: str) -> int:
        """Return a text's tokens, estimated."""
        return self._setting.counter.count(text)

    def _subject(self, passage: str, rng: Random) -> str:
        """Return some words of a passage, to ask about; its first where it ends in blanks."""
        start = passage.rfind(" ", 0, rng.randrange(len(passage))) + 1
        texts = (passage[start:], passage.lstrip())
        words = (" ".join(cut(text, BEGUN_TOKENS, self._setting.counter).split()) for text in texts)
        return next(filter(None, words), "")

    def _question(self, index: int, answer: int, content: str, slo: Slo) -> RequestSpec:
        return RequestSpec(
            prompt=None,
            messages=(ChatMessage("user", content),),
            max_tokens=answer,
            seed=self._setting.seed + index,
            class_name=self.name,
            slo=slo,
        )

    def _written(self, passage: int) -> str:
        setting = self._setting
        rng = setting.rng(self.name, "passage", passage)
        return setting.text(setting.corpus.prose, rng, PASSAGE_TOKENS)


def collection(setting: WorkloadSettings) -> list[str]:
    """Return the passages to be indexed, the most popular first; the same for every seed."""
    rag = Rag(replace(setting, seed=INDEXED_SEED))
    return [rag.passage(place) for place in range(INDEXED)]


@dataclass(frozen=True, slots=True)
class RagFlow:
    """Plan, retrieve, answer. Whatever fails on the way, the user gets an answer.

    Without a plan the words asked about are searched for alone; they are searched for beside its
    queries, too. Without vectors passages are found by their words.

    Attributes:
        about: the passage that the question is about: what should be found.
        subject: the words asked about.
    """

    rag: Rag
    retriever: Retriever
    about: int
    subject: str

    def next(
        self, question: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec | None:
        hops = (self._plan, self._retrieve, self._answer)
        if len(answered) == len(hops):
            return None
        return hops[len(answered)](question, answered, elapsed_s)

    def _plan(self, question: RequestSpec, _: Sequence[Record], elapsed_s: float) -> RequestSpec:
        content = planner.INSTRUCTION + _asked(self.subject)
        work = Work(self.rag.count(content), planner.EXPECTED_PLAN_TOKENS)
        later = (self._retrieval_work(), self._answer_work(question))
        return _chat(
            question,
            PLAN,
            content,
            announced(question.slo, elapsed_s, work, later),
            max_tokens=planner.PLAN_TOKENS,
            extra=(*question.extra, ("response_format", planner.FORMAT)),
        )

    def _retrieve(
        self, question: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec:
        texts = answered[0].texts
        queries = planner.queries_of(texts[0]) if texts else ()
        later = (self._answer_work(question),)
        return replace(
            question,
            prompt=None,
            messages=(),
            inputs=(self.subject, *queries),
            extra=(),
            slo=announced(question.slo, elapsed_s, self._retrieval_work(), later),
            hop=RETRIEVE,
            facts=(("plan_parsed", bool(queries)),),
        )

    def _answer(
        self, question: RequestSpec, answered: Sequence[Record], elapsed_s: float
    ) -> RequestSpec:
        vectors = answered[1].vectors
        found = (
            self.retriever.nearest(vectors, PASSAGES)
            if vectors
            else self.retriever.by_words(self.subject, PASSAGES)
        )
        passages = [self.retriever.passages[place] for place in found]
        content = _over(self.rag.fitting(passages, question.max_tokens), self.subject)
        work = Work(self.rag.count(content), question.max_tokens)
        return _chat(
            question,
            FINAL,
            content,
            announced(question.slo, elapsed_s, work),
            facts=(("passage_found", self.about in found), ("by_vectors", bool(vectors))),
        )

    def _retrieval_work(self) -> Work:
        words = planner.MOST_QUERIES * planner.QUERY_CHARACTERS * "x"
        return Work(self.rag.count(self.subject + words))

    def _answer_work(self, question: RequestSpec) -> Work:
        asking = self.rag.count(INSTRUCTION + _asked(self.subject))
        return Work(PASSAGES * PASSAGE_TOKENS + asking, question.max_tokens)


def _asked(subject: str) -> str:
    return f'{ASKED} "{subject}"?'


def _over(passages: Sequence[str], subject: str) -> str:
    """Return the request for an answer over passages."""
    listed = "".join(f"[{n}] {text}\n\n" for n, text in enumerate(passages, 1))
    return f"{INSTRUCTION}{listed}{_asked(subject)}"


def _chat(question: RequestSpec, hop: str, content: str, slo: Slo, **fields: Any) -> RequestSpec:
    """Return a request of a flow, at the endpoint at which its question is asked."""
    said = replace(
        question, prompt=None, messages=(ChatMessage("user", content),), slo=slo, hop=hop, **fields
    )
    return said if question.prompt is None else through(said, "completions")
