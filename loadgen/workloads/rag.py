"""Workload `rag`: questions about the functions and sections of a collection.

A question is a flow of requests under one deadline, which search the collection and respond from
the passages that they find (`rag_flow`). A question is one request with its passages in the prompt
if no index is available, as in a simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean
from typing import Final

from draftgate.loadgen.planning.pairs import Pair
from draftgate.loadgen.types import ChatMessage, PlannedRequest, RequestSpec, Slo
from draftgate.loadgen.workloads.base import LengthDistribution, Shares, WorkloadSettings, cut, zipf
from draftgate.loadgen.workloads.rag_flow import RagFlow, RagOptions
from draftgate.loadgen.workloads.rag_plan import PASSAGE_TOKENS, PASSAGES, answer_prompt, fit
from draftgate.loadgen.workloads.rag_search import Retriever

_POPULARITY: Final = 0.8
"""The Zipf exponent of the popularity of passages. Web documents have exponents of 0.64 to 0.83
(Breslau et al., INFOCOM 1999)."""

INDEXED: Final = 256
"""The most popular passages, which a server embeds before the run. Always naming the five most
popular of them finds the right passage of 24% of the questions."""

DEADLINE_S: Final = 10.0
"""Default deadline, after which a dialogue loses the user's attention (Nielsen, Usability
Engineering, 1993)."""

ANSWER_LENGTHS: Final = LengthDistribution(median=129, sigma=0.86, least=16, most=601)
"""The distribution of the workload `chat`."""


class Rag:
    """Questions, each about one passage, drawn by popularity.

    The collection and its order are the same for every seed. Requests share the instruction. Two
    requests share their first passage with a probability that depends on its popularity.
    """

    name = "rag"

    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings

    @cached_property
    def pairs(self) -> list[Pair]:
        """The collection, the most popular passages first."""
        counter = self._settings.counter
        return [
            pair._replace(passage=cut(pair.passage, PASSAGE_TOKENS, counter))
            for pair in self._settings.corpus.pairs
        ]

    def request(self, index: int) -> RequestSpec:
        """Return a question as one request with its passages in the prompt."""
        settings = self._settings
        rng = settings.rng(self.name, index)
        answer = settings.answer_tokens(ANSWER_LENGTHS.draw(rng))
        chosen: dict[int, None] = {}
        while len(chosen) < min(PASSAGES, len(self.pairs)):
            chosen[self._popularity.draw(rng)] = None
        question = self.pairs[rng.choice(list(chosen))].question
        passages = [self.pairs[place].passage for place in chosen]
        fitting = fit(settings, passages, answer_prompt((), question), answer)
        return self._spec(index, answer, answer_prompt(fitting, question), settings.slo)

    def planned(
        self, index: int, at_s: float | None, retriever: Retriever, options: RagOptions
    ) -> PlannedRequest:
        """Return the user's question, with the flow of requests that responds to it."""
        settings = self._settings
        rng = settings.rng(self.name, "asked", index)
        answer = settings.answer_tokens(ANSWER_LENGTHS.draw(rng))
        about = self._indexed.draw(rng)
        question = retriever.pairs[about].question
        slo = settings.slo
        if slo.latency_s is None:
            slo = replace(slo, latency_s=DEADLINE_S)
        request = self._spec(index, answer, question, slo)
        by_words = tuple(found.place for found in retriever.by_words(question, PASSAGES))
        context = self._context_tokens
        flow = RagFlow(settings, options, retriever, about, question, by_words, context)
        return PlannedRequest(index, at_s, request, flow)

    @cached_property
    def _popularity(self) -> Shares:
        return zipf(len(self.pairs), _POPULARITY)

    @cached_property
    def _indexed(self) -> Shares:
        return zipf(min(INDEXED, len(self.pairs)), _POPULARITY)

    @cached_property
    def _context_tokens(self) -> int:
        """The expected tokens of the passages of a prompt."""
        count = self._settings.counter.count
        return round(PASSAGES * fmean(count(pair.passage) for pair in self.pairs[:INDEXED]))

    def _spec(self, index: int, answer: int, content: str, slo: Slo) -> RequestSpec:
        messages = (ChatMessage("user", content),)
        return self._settings.spec(self.name, index, answer, messages, slo=slo)


def indexed_pairs(settings: WorkloadSettings) -> Sequence[Pair]:
    """Return the passages of the index and their questions, the most popular first."""
    return Rag(settings).pairs[:INDEXED]
