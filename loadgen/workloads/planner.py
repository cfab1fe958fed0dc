"""The plan of a question over documents: what to search for, as JSON that the server enforces."""

from __future__ import annotations

from typing import Any, Final

from msgspec import DecodeError, Struct
from msgspec.json import decode

MOST_QUERIES: Final = 2
QUERY_CHARACTERS: Final = 60
PLAN_TOKENS: Final = 96
"""Most tokens of a plan: two full queries at two characters a token, and their JSON."""

EXPECTED_PLAN_TOKENS: Final = 24
"""Of a usual plan: the shipped model's had 11 to 25 (six questions, 2026-11-21)."""

INSTRUCTION: Final = (
    "Write one or two short queries by which a search engine finds what answers the question, as"
    ' JSON: {"queries": ["..."]}.\n\n'
)

SCHEMA: Final[dict[str, Any]] = {
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

FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "plan", "schema": SCHEMA}}
"""The field `response_format` of the request."""


class _Plan(Struct):
    queries: list[str]


def queries_of(text: str) -> tuple[str, ...]:
    """Return the queries of a plan; none if it is not one, or says nothing.

    A server that enforces no schema may give anything, and one that does is cut by `max_tokens`.
    """
    try:
        plan = decode(text, type=_Plan)
    except DecodeError:
        return ()
    queries = (query.strip()[:QUERY_CHARACTERS] for query in plan.queries[:MOST_QUERIES])
    return tuple(query for query in queries if query)
