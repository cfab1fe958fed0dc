"""The prompts of `rag`, and the plan of a retrieval: its JSON schema (`rag_plan.json`) and parser.

A server that enforces the schema spells out most of a plan itself: the names of fields, the rest of
a source after its first letter, and the punctuation. Servers may draft such forced tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from msgspec import DecodeError, Struct
from msgspec.json import decode

from draftgate.loadgen.planning.pairs import SOURCES
from draftgate.loadgen.workloads.base import WorkloadSettings, cut

PLAN_SCHEMA: Final[Mapping[str, Any]] = decode(
    Path(__file__).with_name("rag_plan.json").read_bytes()
)

_STEPS: Final = PLAN_SCHEMA["properties"]["steps"]
MOST_STEPS: Final[int] = _STEPS["maxItems"]
QUERY_CHARACTERS: Final[int] = _STEPS["prefixItems"][0]["properties"]["query"]["maxLength"]

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
_QUESTION_START: Final = "Question: what is said about"


class PlanStep(Struct, frozen=True):
    """A search.

    Attributes:
        source: the source to search, one of `SOURCES`.
        query: the words to search for.
        uses: the numbers, from 1, of the earlier steps whose best passages extend the query.
    """

    source: str
    query: str
    uses: tuple[int, ...] = ()


class _Plan(Struct):
    steps: list[PlanStep]


def response_format(earlier_steps: int | None = None) -> dict[str, Any]:
    """Return the `response_format` of a plan.

    Args:
        earlier_steps: the number of earlier steps if the plan may hold only the next step, or None
            for a whole plan. A plan without a next step is then valid, too.
    """
    schema = dict(deepcopy(PLAN_SCHEMA))
    if earlier_steps is not None:
        steps = schema["properties"]["steps"]
        schema["properties"]["steps"] = {
            "type": "array",
            "maxItems": 1,
            "items": steps["prefixItems"][earlier_steps],
        }
    return {"type": "json_schema", "json_schema": {"name": "plan", "schema": schema}}


def parse_plan(text: str, earlier_steps: int | None = None) -> tuple[PlanStep, ...] | None:
    """Return the steps of a plan, or None if the text is not a valid plan.

    A server that enforces no schema may return any text, and a server that enforces the schema may
    stop at `max_tokens`. Fields beside the schema and longer queries are accepted, and queries are
    cut.

    Args:
        earlier_steps: as in `response_format`.
    """
    try:
        steps = decode(text, type=_Plan).steps
    except DecodeError:
        return None
    least, most = (1, MOST_STEPS) if earlier_steps is None else (0, 1)
    if not least <= len(steps) <= most:
        return None
    for number, step in enumerate(steps, (earlier_steps or 0) + 1):
        known = step.source in SOURCES and all(0 < used < number for used in step.uses)
        if not known or not step.query.strip():
            return None
    return tuple(
        PlanStep(step.source, step.query.strip()[:QUERY_CHARACTERS], step.uses) for step in steps
    )


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
    return f'{_QUESTION_START} "{question}"?'


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
