"""Tests with generated valid and invalid requests against a node on a socket.

The OpenAPI document generates the requests. No response is a 5xx, and the status, content type,
headers and body of every response are documented. The node rejects requests that the document
forbids.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.meta import CoveragePhaseData, CoverageScenario

from draftgate.gateway.http.openapi.operations import OPERATIONS
from tests.gateway.harness import needs_engine, running
from tests.gateway.tool_models import with_template

VALID_IS_ACCEPTED = "positive_data_acceptance"
"""The check that a node accepts every request that satisfies the document."""

INVALID_IS_REJECTED = "negative_data_rejection"
"""The check that a node rejects every request that does not satisfy the document."""

TOOL_NAMES = r"tool_choice\S*: .* is not one of the tools$|tools\[\d+\]\S*: .* occurs twice$"
CONTINUED_CALL = r"(content|tool_calls): must not be part of a message to continue$"
PROMPT_LOGPROBS = r"(prompt_logprobs together with|echo together with logprobs and) stream"

CONDITIONS = {
    "the prompt and the output fit into the context": r"maximum context length is",
    "a chosen or allowed tool is one of the tools, whose names differ": TOOL_NAMES,
    "tools are given if a call is required": r"tool_choice: requires tools$",
    "the message that the response continues has no call": CONTINUED_CALL,
    "the response that the input continues is stored": r"previous_response_id: .* does not exist",
    "the model's template uses the variables": r"by this model's chat template is not supported",
    "at most one parameter sets the form of the output": r"cannot be combined with",
    "`min_tokens` is at most the maximum": r"min_tokens: must be at most the \d+ tokens",
    "an embedding has at least the dimensions": r"dimensions: must be between 1 and",
    "the simulator has no embeddings": r"this model does not embed texts",
    "the simulator has no scores": r"this model does not rank documents",
    "streams have no log probabilities of prompts": PROMPT_LOGPROBS,
    "calls of tools have no log probabilities": r"(top_logprobs|include) together with tools",
    "a schema, grammar or regular expression is valid": r"^the [\w ]+ cannot be used: ",
    "a form that needs a schema has one": r"response_format\.json_schema: must be given$",
    "a schema in a text is an object": r"must be a JSON schema that is an object$",
    "the worker has the proposer": r"this worker cannot draft with",
    "the model fills in the middle of texts": r"suffix by this model",
    "the keys of `logit_bias` are in the vocabulary": r"logit_bias: token ids must be between",
    "`best_of` is at least `n`, and equal in a stream": r"best_of: must (be at least|equal) n",
    "a deadline of a flow names the flow": r"x-flow-deadline-ms: requires x-flow-id$",
    "all choices have at most the tokens of a request": r"\(--max-request-tokens",
    "an allowed token does not end the output": r"must have a token that does not end the output$",
    "a page follows an id of the list": r"after: must be an id of the list",
    "a window is a number of hours": r"completion_window: must be a number of hours",
    "metadata has bounds": r"metadata: ",
    "fewer months than days are kept": r"last: must be a whole number from 1 to 13, not",
    "a node without teams has none": r"team: .* does not exist",
    "no operator is created": r"role: must be tenant or metrics",
    "all stop texts have at most some characters": r"must have at most \d+ characters in total",
}
"""Conditions of valid requests that the document does not express, and the errors of requests that
break them. JSON Schema cannot express most of them, and the others only by listing combinations."""

LIVE_TIMEOUT_S = 0.3
"""Time for which a case reads `/live`, which ends only with the node."""

EVENTS = {
    operation.path: operation.events.__name__
    for operation in OPERATIONS
    if operation.events is not None
}

WITH_INPUT = {f"{o.method} {o.path}" for o in OPERATIONS if o.body is not None or o.parameters}
"""Operations whose requests can be invalid. The header with the id accepts any value."""


class Count(NamedTuple):
    """Number of valid and invalid cases of an operation."""

    valid: int
    invalid: int


QUICK = Count(10, 5)
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
    "GET /v1/files": Count(100, 50),
    "GET /v1/files/{file_id}": Count(50, 50),
    "DELETE /v1/files/{file_id}": Count(50, 50),
    "GET /v1/files/{file_id}/content": Count(50, 50),
    "POST /v1/batches": Count(200, 100),
    "GET /v1/batches": Count(100, 50),
    "GET /v1/batches/{batch_id}": Count(50, 50),
    "POST /v1/batches/{batch_id}/cancel": Count(50, 50),
    "POST /v1/rerank": Count(100, 50),
    "POST /rerank": Count(100, 50),
    "POST /v2/rerank": Count(100, 50),
    "POST /score": Count(100, 50),
    "POST /v1/score": Count(100, 50),
    "POST /tokenize": Count(2000, 600),
    "POST /detokenize": Count(2500, 600),
    "GET /decisions": Count(900, 400),
    "GET /live": Count(40, 40),
    "PUT /workers/{worker_id}/role": Count(100, 100),
    "GET /v1/models/{model}": Count(600, 200),
    "GET /records": Count(400, 200),
    "GET /records/{request_id}": Count(100, 50),
    "POST /session": Count(100, 50),
    "GET /usage/history": Count(100, 50),
    "POST /keys": Count(100, 100),
    "GET /keys/{name}": Count(50, 50),
    "PATCH /keys/{name}": Count(100, 100),
    "DELETE /keys/{name}": Count(50, 50),
    "POST /keys/{name}/rotate": Count(100, 50),
    "GET /audit": Count(50, 50),
    "GET /requests/{request_id}": Count(100, 50),
    "GET /web/{name}": Count(200, 100),
}
LONG_WITHOUT_INPUT = Count(200, 0)
"""Number of cases of operations whose only input is a header."""


class Tally:
    """Statuses of all responses, a message for each wrong response, and the broken conditions."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.conditions: Counter[str] = Counter()

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
    assert ready.wait(60)
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
    fast["files"] = str(tmp_path_factory.mktemp("files"))
    with node_in_a_thread(**fast) as gateway:
        yield gateway


class Sender:
    """A client that sends cases to a node, and checks the responses.

    Attributes:
        tally: the results.
    """

    def __init__(self, url: str, session: requests.Session) -> None:
        self.tally = Tally()
        self._url = url
        self._session = session
        self._schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        # The default ends the connection before the stream ends.
        self._schema.config.max_stream_events = 10_000
        self._document = session.get(f"{url}/openapi.json", timeout=30).json()

    def send_all(self, counts: dict[str, Count], otherwise: Count) -> None:
        """Send the given number of generated cases of every operation, and systematic cases."""
        for found in self._schema.get_all_operations():
            operation = found.ok()
            count = counts.get(operation.label, otherwise)
            self._send_generated(operation, GenerationMode.POSITIVE, count.valid)
            if operation.label in WITH_INPUT:
                self._send_generated(operation, GenerationMode.NEGATIVE, count.invalid)
            self._send_systematic(operation, count.invalid)

    def _send_generated(self, operation: Any, mode: GenerationMode, examples: int) -> None:
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
            self._send(case)

        send_case()

    def _send_systematic(self, operation: Any, most: int) -> None:
        """Send boundary values, missing parameters, and methods that the path does not have."""
        cases = self._schema.iter_coverage_cases(
            operation,
            generation_modes=list(GenerationMode),
            generation_config=self._schema.config.generation_for(operation=operation),
        )
        for case in islice(cases, most):
            self._send(case)

    def _send(self, case: Case) -> None:
        path = case.operation.path
        timeout_s = LIVE_TIMEOUT_S if path == "/live" else 60
        response = case.call(base_url=self._url, session=self._session, timeout=timeout_s)
        self.tally.statuses[response.status_code] += 1
        broken = _broken_condition(response)
        excluded = []
        if broken is not None:
            self.tally.conditions[broken] += 1
            excluded.append(VALID_IS_ACCEPTED)
        if _has_unknown_header(case):
            excluded.append(INVALID_IS_REJECTED)
        try:
            case.validate_response(response, excluded_checks=CHECKS.get_by_names(excluded))
            _check_events(path, response, self._document)
        except (AssertionError, BaseExceptionGroup, jsonschema.ValidationError) as error:
            parts = getattr(error, "exceptions", [error])
            place, found = case.operation.label, response.content[:500]
            self.tally.wrong += [f"{place}: {str(part)[:3000]} {found!r}" for part in parts]


def _has_unknown_header(case: Case) -> bool:
    """Return whether only an unknown header makes a case invalid. HTTP allows such headers."""
    data = case.meta.phase.data if case.meta is not None else None
    return (
        isinstance(data, CoveragePhaseData)
        and data.scenario is CoverageScenario.OBJECT_UNEXPECTED_PROPERTIES
        and data.parameter_location is ParameterLocation.HEADER
    )


def _broken_condition(response: Any) -> str | None:
    """Return which of `CONDITIONS` a rejected request breaks, or None."""
    if response.status_code != 400:
        return None
    message = response.json()["error"]["message"]
    return next((name for name, error in CONDITIONS.items() if re.search(error, message)), None)


def send_cases(url: str, counts: dict[str, Count], otherwise: Count) -> Tally:
    """Send the given number of cases of every operation."""
    with requests.Session() as session:
        sender = Sender(url, session)
        sender.send_all(counts, otherwise)
    return sender.tally


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
    elif path != "/live":
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
    tally = send_cases(url, {"GET /live": Count(2, 2)}, QUICK)
    assert not tally.wrong, "\n\n".join(tally.wrong)
    assert tally.cases >= 200
    assert tally.successes >= 0.3 * tally.cases
    assert max(tally.statuses) < 500


def test_long_run_covers_every_operation_with_input() -> None:
    """The long run has case counts for every operation with input."""
    assert LONG.keys() >= WITH_INPUT


@pytest.mark.long
def test_twenty_thousand_cases_get_documented_responses(url: str) -> None:
    """The node responds to 20,000 cases as documented, and at least 30% of them succeed."""
    tally = send_cases(url, LONG, LONG_WITHOUT_INPUT)
    assert not tally.wrong, "\n\n".join(tally.wrong)
    assert tally.cases >= 20_000
    assert tally.successes >= 0.3 * tally.cases
    assert max(tally.statuses) < 500


@pytest.mark.long
@needs_engine
def test_cases_of_embeddings_get_documented_responses() -> None:
    """An engine, which has embeddings, accepts every valid case of `/v1/embeddings`."""
    settings = {"kv_bytes": 32 << 20, "threads": 1, "max_model_len": 512}
    with node_in_a_thread(backend="engine", **settings) as url:
        tally = send_cases(url, {"POST /v1/embeddings": Count(800, 300)}, Count(1, 1))
    assert not tally.wrong, "\n\n".join(tally.wrong)
    assert "the simulator has no embeddings" not in tally.conditions


@pytest.mark.long
@needs_engine
def test_cases_of_rerank_requests_get_documented_responses(tmp_path: Path) -> None:
    """A cross-encoder accepts every valid case of `/v1/rerank`."""
    from tests.engine.test_cross_encoder import save_cross_encoder

    save_cross_encoder(tmp_path)
    with node_in_a_thread(backend="engine", model=str(tmp_path), threads=1) as url:
        tally = send_cases(url, {"POST /v1/rerank": Count(300, 150)}, Count(1, 1))
    wrong = [message for message in tally.wrong if "rerank:" in message]  # the only task
    assert not wrong, "\n\n".join(wrong)
    assert "the simulator has no scores" not in tally.conditions
