"""Tests with generated valid and invalid requests against a node on a socket.

The OpenAPI document generates the requests. No response is a 5xx, and the status, content type,
headers and body of every response are documented. The node rejects requests that the document
forbids.
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

# The document does not describe relations between fields and the context length, so the node may
# reject a body that satisfies the document. No header is required.
EXCLUDED_CHECKS = ["positive_data_acceptance", "missing_required_header"]

EVENTS = {
    operation.path: operation.events.__name__
    for operation in OPERATIONS
    if operation.events is not None
}


class Count(NamedTuple):
    """Number of valid and invalid cases of an operation."""

    valid: int
    invalid: int


ENDLESS = {"GET /live"}
"""Operations whose streams end only with the node. Other tests read these streams."""

QUICK = Count(14, 8)
LONG = {
    "POST /v1/chat/completions": Count(2400, 800),
    "POST /v1/completions": Count(4000, 1200),
    "POST /v1/responses": Count(2400, 800),
    "POST /v1/responses/input_tokens": Count(600, 200),
    "GET /v1/responses/{response_id}": Count(100, 50),
    "DELETE /v1/responses/{response_id}": Count(100, 50),
    "GET /v1/responses/{response_id}/input_items": Count(200, 100),
    "POST /v1/messages": Count(2400, 800),
    "POST /v1/messages/count_tokens": Count(600, 200),
    "POST /v1/embeddings": Count(800, 300),
    "POST /tokenize": Count(2000, 600),
    "POST /detokenize": Count(2500, 600),
    "GET /decisions": Count(900, 400),
    "GET /v1/models/{model}": Count(600, 200),
    "GET /web/{name}": Count(200, 100),
}
LONG_WITHOUT_INPUT = Count(200, 0)
"""Number of cases of operations whose only input is a header."""


class Tally:
    """Statuses of all responses and a message for each undocumented response."""

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
    """Run a node in a thread for a blocking client and yield its URL."""
    started: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()
        async with running(**settings) as gateway:
            started.append((gateway.url, asyncio.get_running_loop(), stop))
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
    """The URL of a fast node whose model supports tools."""
    model: Path = with_template(tmp_path_factory.mktemp("models") / "qwen", "qwen2_5")
    fast = {"sim_service_ms": 0.05, "model": str(model), "max_model_len": 512}
    with node_in_a_thread(**fast) as gateway:
        yield gateway


def send_cases(url: str, counts: dict[str, Count], otherwise: Count) -> Tally:
    """Send the given number of cases of every operation."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.max_stream_events = (
        10_000  # the default ends the connection before the stream ends
    )
    document = requests.get(f"{url}/openapi.json", timeout=30).json()
    tally = Tally()
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.label in ENDLESS:
                continue
            count = counts.get(operation.label, otherwise)
            modes = [(GenerationMode.POSITIVE, count.valid)]
            if any(operation.label == f"{o.method} {o.path}" and _has_input(o) for o in OPERATIONS):
                modes.append((GenerationMode.NEGATIVE, count.invalid))
            for mode, examples in modes:
                _send(operation, mode, examples, session, url, document, tally)
    return tally


def _has_input(operation: Any) -> bool:
    """Return whether a request can be invalid. The header with the id accepts any value."""
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
    def send_case(case: Case) -> None:
        response = case.call(base_url=url, session=session, timeout=60)
        tally.statuses[response.status_code] += 1
        try:
            case.validate_response(response, excluded_checks=CHECKS.get_by_names(EXCLUDED_CHECKS))
            _check_events(operation.path, response, document)
        except (AssertionError, BaseExceptionGroup, jsonschema.ValidationError) as error:
            parts = getattr(error, "exceptions", [error])
            tally.wrong += [f"{operation.label}: {str(part)[:3000]}" for part in parts]

    send_case()


def _check_events(path: str, response: Any, document: dict[str, Any]) -> None:
    """Assert that every event of a stream satisfies its schema and that the stream ends once."""
    kind = "".join(response.headers.get("content-type", []))
    if not kind.startswith("text/event-stream"):
        return
    # Not `splitlines`, which also ends a line at U+0085 or U+2028 within a JSON string.
    lines = response.content.decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if path == "/v1/messages":
        assert json.loads(data[-1]) == {"type": "message_stop"}
    else:
        assert data.pop() == "[DONE]"
    if path == "/v1/responses":
        last = json.loads(data[-1])["type"]
        assert last in {"response.completed", "response.incomplete"}
    schema = {
        "$ref": f"#/components/schemas/{EVENTS[path]}",
        "components": document["components"],
    }
    validator = jsonschema.Draft202012Validator(schema)
    for event in data:
        validator.validate(json.loads(event))


def test_hundreds_of_cases_get_documented_responses(url: str) -> None:
    """The node responds to every generated case as documented, and many cases succeed."""
    tally = send_cases(url, {}, QUICK)
    assert tally.wrong == []
    assert tally.cases >= 200
    assert tally.successes >= 0.3 * tally.cases
    assert max(tally.statuses) < 500


def test_long_run_covers_every_operation_with_input() -> None:
    """The long run has case counts for every operation with input."""
    with_input = {f"{o.method} {o.path}" for o in OPERATIONS if _has_input(o)}
    assert with_input <= LONG.keys() | ENDLESS


@pytest.mark.long
def test_twenty_thousand_cases_get_documented_responses(url: str) -> None:
    """The node responds to 20,000 cases as documented, and at least 30% of them succeed."""
    tally = send_cases(url, LONG, LONG_WITHOUT_INPUT)
    assert tally.wrong == []
    assert tally.cases >= 20_000
    assert tally.successes >= 0.3 * tally.cases
    assert max(tally.statuses) < 500
