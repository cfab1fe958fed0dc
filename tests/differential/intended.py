"""Differences to the baseline that are intended."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.differential.comparison import Difference


class Rule(NamedTuple):
    """A kind of intended differences.

    Attributes:
        kind, case, before, after: patterns, each of which must occur in its part of the difference.
    """

    reason: str
    kind: str
    case: str = ""
    before: str = ""
    after: str = ""


CLIENT = "upstreams have a client of their own instead of aiohttp's"
DIRECT = "the gateway reads requests itself instead of aiohttp"

STEPS = "an idle worker plans no steps"
ORDER = "the order of choices within a step, and with it their running usage, is not defined"

HEADERS = "the headers of a request are read first and together, on each endpoint"
UPGRADE = "a request for another protocol ends the connection"
MODELS = "the gateway lists the models of upstreams from their latest lists"
EXPECTATION = "a request with an unknown expectation ends the connection"
FOLDED = "drafts of the last minutes are counted when they are folded"

RULES = (
    Rule(
        HEADERS,
        "^(body|status|log line request|header content-length|request to the upstream)$",
        "wrong header",
    ),
    Rule(
        UPGRADE,
        "^(header connection|closed)$",
        "asks for an upgrade",
        "None|False|keep-alive",
        "close|True",
    ),
    Rule(
        EXPECTATION,
        "^(header connection|closed)$",
        "unknown expectation",
        "None|False",
        "close|True",
    ),
    Rule(
        MODELS,
        "^(form of the body|request to the upstream|header content-(type|length))$",
        "GET /v1/models",
    ),
    Rule(FOLDED, r"^/decisions\.drafts\."),
    Rule(STEPS, r"/decisions\.decisions\[\]\.load\.steps"),
    Rule(STEPS, "body", "GET /decisions", '"steps":'),
    Rule(STEPS, "header content-length", "GET /decisions"),
    Rule(ORDER, "order of choices in a step"),
    Rule(
        ORDER,
        "^event$",
        "stream",
        r'"choices":\[\{"index".*"usage":',
        r'"choices":\[\{"index".*"usage":',
    ),
    Rule(
        f"number of requests that aiohttp reads: {DIRECT}", "metric draftgate_http_handovers_total"
    ),
    Rule(
        f"an empty query stays in the target: {DIRECT}",
        "request to the upstream",
        r"\?",
        "",
        r"\? HTTP",
    ),
    Rule(f"User-Agent: {CLIENT}", "header user-agent to the upstream", after="draftgate/"),
    Rule(
        f"Connection: {CLIENT}", "header connection to the upstream", "cut-at-once", "close", "None"
    ),
    Rule(f"fewer repetitions: {CLIENT}", "request to the upstream", "cut-at-once", "POST", "^$"),
    Rule(f"errors: {CLIENT}", "log line request", "", "ClientResponseError", "cannot be read"),
)


def intended(difference: Difference) -> str | None:
    """Return why a difference is intended, or None."""
    for rule in RULES:
        parts = (difference.kind, difference.case, difference.before, difference.after)
        patterns = (rule.kind, rule.case, rule.before, rule.after)
        if all(map(re.search, patterns, parts)):
            return rule.reason
    return None
