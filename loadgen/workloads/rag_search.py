"""Executes the steps of a plan over a collection of passages. Performs no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from draftgate.loadgen.planning.pairs import Pair
from draftgate.loadgen.workloads.rag_plan import QUERY_CHARACTERS, PlanStep


class FoundPassage(NamedTuple):
    """A passage that a search found.

    Attributes:
        place: its position in the collection.
        score: at most 1 for a passage that matches the query completely.
    """

    place: int
    score: float


class Retriever(Protocol):
    """Finds passages of a collection, best first."""

    @property
    def pairs(self) -> Sequence[Pair]:
        """The passages with their questions, the most popular first."""
        ...

    def nearest(self, vector: bytes, count: int, source: str = "") -> list[FoundPassage]:
        """Return the passages nearest to a vector (little-endian float32), of one source or all."""
        ...

    def by_words(self, text: str, count: int, source: str = "") -> list[FoundPassage]:
        """Return the passages that share the rarest words with a text, of one source or all."""
        ...


class PassageSearch(NamedTuple):
    """A search that is ready to run. The number 0 is the question itself, in all sources."""

    number: int
    text: str
    source: str = ""


class Searches:
    """The searches of one question so far, and what they found.

    The first search is always the question itself, so that a question without a plan finds
    passages, too.

    Args:
        count: the passages that each search keeps.
    """

    def __init__(self, retriever: Retriever, question: str, count: int) -> None:
        self._retriever = retriever
        self._count = count
        self._question = question
        self._steps: list[PlanStep] = []
        self._found: dict[int, list[FoundPassage]] = {}

    @property
    def steps(self) -> int:
        """The number of planned steps."""
        return len(self._steps)

    def add(self, steps: Iterable[PlanStep]) -> None:
        """Add steps, whose numbers continue those of the earlier steps."""
        self._steps += steps

    def ready(self) -> list[PassageSearch]:
        """Return the searches that have not run, and use no step that has not run."""
        searches = [] if 0 in self._found else [PassageSearch(0, self._question)]
        for number, step in enumerate(self._steps, 1):
            if number not in self._found and all(used in self._found for used in step.uses):
                searches.append(PassageSearch(number, self._text(step), step.source))
        return searches

    def run(self, vectors: Sequence[bytes]) -> None:
        """Run the searches that are ready.

        Args:
            vectors: the vector of each search. Without vectors, searches compare words.
        """
        ready, retriever = self.ready(), self._retriever
        if vectors:
            for search, vector in zip(ready, vectors, strict=True):
                self._found[search.number] = retriever.nearest(vector, self._count, search.source)
        else:
            for search in ready:
                found = retriever.by_words(search.text, self._count, search.source)
                self._found[search.number] = found

    def best(self) -> list[int]:
        """Return the positions of the passages with the best score in any search.

        Searches do not add up (CombMAX of Fox and Shaw, TREC-2, 1994), so that repeated queries
        cannot displace the passages of the question. Of equal scores, the passage of the earlier
        search is first.
        """
        scores = dict[int, float]()
        for number in sorted(self._found):
            for place, score in self._found[number]:
                scores[place] = max(scores.get(place, score), score)
        return sorted(scores, key=lambda place: -scores[place])[: self._count]

    def _text(self, step: PlanStep) -> str:
        """Return a query, and the first line of the best passage of each step that it uses."""
        best = (found for used in step.uses for found in self._found[used][:1])
        passages = (self._retriever.pairs[found.place].passage for found in best)
        first_lines = (passage.strip().partition("\n")[0] for passage in passages)
        return " ".join([step.query, *(line[:QUERY_CHARACTERS] for line in first_lines)])
