"""The prompts of the workload `rag`, and passages cut to the server's context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from draftgate.loadgen.workloads.base import WorkloadSettings, cut

PASSAGES: Final = 5
PASSAGE_TOKENS: Final = 256
"""Passages per question, five as in Lewis et al. (NeurIPS 2020), and the limit of their length.
Their passages have 100 words, but today's retrievers return about 200 to 1,000 tokens."""

INSTRUCTION: Final = (
    "Answer the question from the passages below. Quote the sentence that your answer rests on, and"
    " name its passage. If the passages do not tell, say so.\n\n"
)
PLAN_INSTRUCTION: Final = (
    "Plan one to three searches that find what answers the question. A search names its source"
    " (code or documentation), a short query, and the numbers of earlier searches whose results it"
    ' uses, as JSON: {"steps": [{"source": "code", "query": "...", "uses": []}]}.\n\n'
)
NEXT_INSTRUCTION: Final = (
    "Name the next search that finds what answers the question: its source (code or"
    " documentation), a short query, and the numbers of earlier searches whose results it uses, as"
    ' JSON: {"steps": [{"source": "code", "query": "...", "uses": []}]}. If the passages below'
    ' answer the question, write {"steps": []}.\n\n'
)
QUESTION_START: Final = "Question: what is said about"


def plan_prompt(question: str) -> str:
    """Return the prompt for a whole plan."""
    return PLAN_INSTRUCTION + asked(question)


def next_prompt(passages: Sequence[str], question: str) -> str:
    """Return the prompt for the next search, over the passages so far."""
    return NEXT_INSTRUCTION + _listed(passages) + asked(question)


def answer_prompt(passages: Sequence[str], question: str) -> str:
    """Return the prompt for the answer."""
    return INSTRUCTION + _listed(passages) + asked(question)


def asked(question: str) -> str:
    """Return the question as prompts state it."""
    return f'{QUESTION_START} "{question}"?'


def fit(
    settings: WorkloadSettings, passages: Sequence[str], prompt: str, answer_tokens: int
) -> list[str]:
    """Return passages cut to their limit and to the server's context.

    Args:
        prompt: the prompt without passages.
        answer_tokens: the limit of the response.
    """
    beside = settings.counter.count(prompt)
    tokens = settings.prompt_tokens(PASSAGES * PASSAGE_TOKENS, answer_tokens, beside=beside)
    each = max(tokens // PASSAGES, 1)
    return [cut(passage, each, settings.counter) for passage in passages]


def _listed(passages: Sequence[str]) -> str:
    return "".join(f"[{n}] {text}\n\n" for n, text in enumerate(passages, 1))
