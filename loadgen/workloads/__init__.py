"""What to ask, as a function of (setting, index): a plan can be rebuilt, and simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.types import Slo
from draftgate.loadgen.workloads.base import (
    Endpoint,
    Workload,
    WorkloadSettings,
    prompt_text,
    through,
)
from draftgate.loadgen.workloads.chat import Chat
from draftgate.loadgen.workloads.code import Code
from draftgate.loadgen.workloads.documents import LongDocument
from draftgate.loadgen.workloads.mixed import Mixed
from draftgate.loadgen.workloads.rag import Rag, Retriever, collection
from draftgate.loadgen.workloads.shared_prefix import SharedPrefix
from draftgate.loadgen.workloads.tokens import ApproximateCounter, TokenCounter, fit_counter
from draftgate.loadgen.workloads.trace import Replay, Row

__all__ = [
    "WORKLOADS",
    "ApproximateCounter",
    "Endpoint",
    "Rag",
    "Replay",
    "Retriever",
    "Row",
    "TokenCounter",
    "Workload",
    "fit_counter",
    "indexed_passages",
    "make_workload",
    "prompt_text",
    "replay",
    "through",
]

WORKLOADS: Final[Mapping[str, Callable[[WorkloadSettings], Workload]]] = MappingProxyType(
    {made.name: made for made in (Code, Chat, LongDocument, SharedPrefix, Mixed, Rag)}
)
"""By the names of the contract."""


def make_workload(
    name: str,
    *,
    seed: int,
    counter: TokenCounter | None = None,
    max_tokens: int | None = None,
    max_model_len: int | None = None,
    slo: Slo = Slo(),  # noqa: B008 - immutable
    text_file: Path | None = None,
) -> Workload:
    """Return a workload.

    Args:
        name: of `WORKLOADS`.
        seed: the same seed on the same corpus gives the same questions.
        counter: measures prompts; None estimates.
        max_tokens: every answer's limit; None draws it from the workload's distribution.
        max_model_len: tokens the server holds per sequence; prompts and answers are cut to fit.
        slo: what requests are promised; mixed gives its classes multiples of it.
        text_file: the text to ask about instead of this Python's own.

    Raises:
        OSError: the file cannot be read.
        ValueError: no such workload, or no text.
    """
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    counter = counter or ApproximateCounter()
    corpus = open_corpus(text_file)
    return WORKLOADS[name](WorkloadSettings(seed, counter, corpus, max_tokens, max_model_len, slo))


def indexed_passages(counter: TokenCounter, text_file: Path | None = None) -> list[str]:
    """Return the passages that `rag` retrieves, to make an index of.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no text.
    """
    return collection(WorkloadSettings(0, counter, open_corpus(text_file), None, None, Slo()))


def replay(
    rows: Sequence[Row],
    *,
    seed: int,
    counter: TokenCounter | None = None,
    max_tokens: int | None = None,
    max_model_len: int | None = None,
    slo: Slo = Slo(),  # noqa: B008 - immutable
    text_file: Path | None = None,
) -> Replay:
    """Return a trace's rows as questions; arguments as in `make_workload`.

    `max_tokens` replaces the lengths of answers that the trace recorded.
    """
    counter = counter or ApproximateCounter()
    corpus = open_corpus(text_file)
    return Replay(rows, WorkloadSettings(seed, counter, corpus, max_tokens, max_model_len, slo))
