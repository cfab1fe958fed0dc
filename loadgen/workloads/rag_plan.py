"""The plan of a retrieval: its JSON schema (`rag_plan.json`), and a parser for plans.

A server that enforces the schema spells out most of a plan itself: the names of fields, the rest of
a source after its first letter, and the punctuation. Servers may draft such forced tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from msgspec import DecodeError, Struct
from msgspec.json import decode

from draftgate.loadgen.planning.pairs import SOURCES

PLAN_SCHEMA: Final[Mapping[str, Any]] = decode(
    Path(__file__).with_name("rag_plan.json").read_bytes()
)

_STEPS: Final = PLAN_SCHEMA["properties"]["steps"]
MOST_STEPS: Final[int] = _STEPS["maxItems"]
QUERY_CHARACTERS: Final[int] = _STEPS["prefixItems"][0]["properties"]["query"]["maxLength"]


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
