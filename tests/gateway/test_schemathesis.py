"""Valid and invalid requests generated from the OpenAPI document, against a node on a socket.

No answer is a 5xx, and each has a status, content type, headers and body that are documented.
Requests that the document forbids are refused.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS

from draftgate.gateway.http.openapi.operations import OPERATIONS
from tests.gateway.harness import running
from tests.gateway.tool_models import with_template

# Relations between fields and the length of the context are beyond the document, so a body that
# satisfies it may be refused; and no header is demanded.
LEFT_OUT = ["positive_data_acceptance", "missing_required_header"]

EVENTS = {one.path: one.events.__name__ for one in OPERATIONS if one.events is not None}


class Count(NamedTuple):
    """Valid and invalid cases of an operation."""

    sound: int
    broken: int


ENDLESS = {"GET /live"}
"""Streams that end with the node: `test_live.py` reads them."""

QUICK = Count(14, 8)
LONG = {
    "POST /v1/chat/completions": Count(2400, 800),
    "POST /v1/completions": Count(4000, 1200),
    "POST /v1/responses": Count(2400, 800),
    "POST /v1/embeddings": Count(800, 300),
    "POST /tokenize": Count(2000, 600),
    "POST /detokenize": Count(2500, 600),
    "GET /decisions": Count(900, 400),
    "GET /v1/models/{model}": Count(600, 200),
    "GET /web/{name}": Count(200, 100),
}
LONG_WITHOUT_INPUT = Count(200, 0)
"""Of operations that take a header alone."""


class Tally:
    """The answers, and which of them the document does not allow."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []

    @property
    def cases(self) -> int:
        return self.statuses.total()

    @property
    def successes(self) -> int:
        return sum(n for status, n in self.statuses.items() if 200 <= status < 300)


@contextmanager
def node_in_a_thread(**settings: Any) -> Iterator[str]:
    """Run a node in a thread, so that a blocking client can talk to it; yields its URL."""
    started: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()
        async with running(**settings) as where:
            started.append((where.url, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    url, loop, stop = started[0]
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node whose model supports tools, with immediate answers."""
    model: Path = with_template(tmp_path_factory.mktemp("models") / "qwen", "qwen2_5")
    fast = {"sim_service_ms": 0.05, "model": str(model), "max_model_len": 512}
    with node_in_a_thread(**fast) as where:
        yield where


def sent(url: str, counts: dict[str, Count], otherwise: Count) -> Tally:
    """Send this many cases of every operation."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.max_stream_events = 10_000  # by default it leaves before a stream ends
    document = requests.get(f"{url}/openapi.json", timeout=30).json()
    tally = Tally()
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.label in ENDLESS:
                continue
            count = counts.get(operation.label, otherwise)
            modes = [(GenerationMode.POSITIVE, count.sound)]
            if any(operation.label == f"{o.method} {o.path}" and _has_input(o) for o in OPERATIONS):
                modes.append((GenerationMode.NEGATIVE, count.broken))
            for mode, examples in modes:
                _send(operation, mode, examples, session, url, document, tally)
    return tally


def _has_input(operation: Any) -> bool:
    """Whether a request can be invalid; the header for its id accepts any value."""
    return operation.body is not None or bool(operation.parameters)


def _send(
    operation: Any,
    mode: GenerationMode,
    examples: int,
    session: requests.Session,
    url: str,
    document: dict[str, Any],
    tally: Tally,
) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def one(case: Case) -> None:
        answer = case.call(base_url=url, session=session, timeout=60)
        tally.statuses[answer.status_code] += 1
        try:
            case.validate_response(answer, excluded_checks=CHECKS.get_by_names(LEFT_OUT))
            _check_events(operation.path, answer, document)
        except (AssertionError, BaseExceptionGroup, jsonschema.ValidationError) as error:
            parts = getattr(error, "exceptions", [error])
            tally.wrong += [f"{operation.label}: {str(part)[:3000]}" for part in parts]

    one()


def _check_events(path: str, answer: Any, document: dict[str, Any]) -> None:
    """Check every event of a stream against its schema, and that the stream ends once."""
    kind = "".join(answer.headers.get("content-type", []))
    if not kind.startswith("text/event-stream"):
        return
    lines = answer.content.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if path == "/v1/responses":
        last = json.loads(data[-1])["type"]
        assert last in {"response.completed", "response.incomplete"}
    else:
        assert data.pop() == "[DONE]"
    schema = {
        "$ref": f"#/components/schemas/{EVENTS[path]}",
        "components": document["components"],
    }
    validator = jsonschema.Draft202012Validator(schema)
    for event in data:
        validator.validate(json.loads(event))


def test_hundreds_of_cases_are_answered_as_documented(url: str) -> None:
    """No case gets a 5xx or an undocumented answer, and a good share succeeds."""
    tally = sent(url, {}, QUICK)
    assert tally.wrong == []
    assert tally.cases >= 200
    assert tally.successes >= 0.3 * tally.cases
    assert max(tally.statuses) < 500


def test_long_run_covers_every_operation_with_input() -> None:
    """Each has a number of valid and of invalid cases."""
    taking = {f"{one.method} {one.path}" for one in OPERATIONS if _has_input(one)}
    assert taking <= LONG.keys() | ENDLESS


@pytest.mark.long
def test_twenty_thousand_cases_are_answered_as_documented(url: str) -> None:
    """At least 30% of the cases reach a 2xx."""
    tally = sent(url, LONG, LONG_WITHOUT_INPUT)
    assert tally.wrong == []
    assert tally.cases >= 20_000
    assert tally.successes >= 0.3 * tally.cases
    assert max(tally.statuses) < 500
