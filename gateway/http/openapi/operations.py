"""The table of operations, with the parameters, body and response of each path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from draftgate.gateway.dispatch.decisions import KEPT
from draftgate.gateway.http.context import LONGEST_ID, MESSAGES_PATH
from draftgate.gateway.http.endpoints.anthropic import COUNT_PATH
from draftgate.gateway.http.endpoints.live import MOST_INTERVAL_S, SHOWN
from draftgate.gateway.http.endpoints.page import file_names
from draftgate.gateway.http.endpoints.records import FILTERS
from draftgate.gateway.http.endpoints.rerank import PATHS as RERANK_PATHS
from draftgate.gateway.http.endpoints.score import PATHS as SCORE_PATHS
from draftgate.gateway.http.endpoints.session import SessionReply
from draftgate.gateway.http.endpoints.stored_responses import (
    DEFAULT_ITEMS,
    ITEMS_PATH,
    MOST_ITEMS,
    ORDERS,
    PATH,
)
from draftgate.gateway.http.openapi.administration import ADMINISTRATION
from draftgate.gateway.http.openapi.operation import Operation, in_path, in_query, in_query_text
from draftgate.gateway.http.openapi.storage import STORAGE_OPERATIONS
from draftgate.gateway.http.replies.anthropic_shapes import (
    MessageErrorReply,
    MessageEvent,
    MessageReply,
    MessageTokensReply,
)
from draftgate.gateway.http.replies.response_shapes import ResponseEvent, ResponseReply
from draftgate.gateway.http.replies.shapes import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DeletedResponse,
    DetokenizeReply,
    EmbeddingList,
    HealthReply,
    InputItemList,
    InputTokensReply,
    ModelList,
    ModelReply,
    ReadyReply,
    RerankReply,
    ScoreList,
    TokenizeReply,
    VersionReply,
)
from draftgate.gateway.http.requests.anthropic import CountTokensBody, MessagesBody
from draftgate.gateway.http.requests.responses import ResponsesBody
from draftgate.gateway.http.requests.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    SessionBody,
    TokenizeBody,
    WorkerRoleBody,
)
from draftgate.gateway.telemetry.live import NodeSample
from draftgate.gateway.telemetry.recent_drafts import DecisionList
from draftgate.gateway.telemetry.request_facts import RequestDetail, RequestList
from draftgate.gateway.telemetry.worker_list import ListedWorker, WorkerList

_REQUEST_ID: Final = in_path("request_id", minLength=1, maxLength=LONGEST_ID)
_RESPONSE_ID: Final = in_path("response_id", pattern="^resp_[0-9a-f]{24}$")

OF_BODIES: Final = (400, 404, 408, 413, 503)
OF_GENERATION: Final = (400, 404, 408, 413, 429, 503)


def _with_aliases(
    paths: Sequence[str], summary: str, reply: type, body: type
) -> Iterator[Operation]:
    """Yield the operation at its first path, and its aliases at the others."""
    for path in paths:
        yield Operation(
            "POST", path, summary, reply, body, errors=OF_GENERATION, alias=path != paths[0]
        )


_HELLO: Final = [{"role": "user", "content": "def add(a, b):"}]

OPERATIONS: Final = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Create a chat completion.",
        ChatReply,
        ChatBody,
        ChatChunk,
        errors=OF_GENERATION,
        examples={
            "whole": {"messages": _HELLO, "max_tokens": 16, "temperature": 0},
            "streamed": {
                "messages": _HELLO,
                "max_tokens": 16,
                "seed": 7,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            "speculation": {
                "messages": _HELLO,
                "max_tokens": 16,
                "n": 2,
                "logprobs": True,
                "top_logprobs": 2,
                "speculation": {"mode": "ngram", "max_draft_tokens": 3, "trace": True},
            },
        },
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Create completions of one or more texts.",
        CompletionReply,
        CompletionBody,
        CompletionReply,
        errors=OF_GENERATION,
        examples={
            "whole": {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0},
            "several": {"prompt": ["import ", "class "], "n": 2, "max_tokens": 8, "stop": ["\n\n"]},
            "streamed": {"prompt": "for i in ", "max_tokens": 16, "stream": True, "priority": -1},
            "evaluation": {
                "prompt": "def add(a, b):",
                "max_tokens": 0,
                "echo": True,
                "logprobs": 1,
                "prompt_logprobs": 1,
            },
        },
    ),
    Operation(
        "POST",
        "/v1/responses",
        "Create a response, and store it unless `store` is false.",
        ResponseReply,
        ResponsesBody,
        ResponseEvent,
        errors=OF_GENERATION,
        examples={
            "whole": {"input": "def add(a, b):", "max_output_tokens": 16, "temperature": 0},
            "streamed": {
                "instructions": "Write Python.",
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "x = "}]}],
                "max_output_tokens": 16,
                "metadata": {"purpose": "example"},
                "stream": True,
            },
            "log probabilities": {
                "input": "def add(a, b):",
                "max_output_tokens": 16,
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 2,
                "truncation": "auto",
            },
        },
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "Count the tokens of the input of a response.",
        InputTokensReply,
        ResponsesBody,
        errors=OF_BODIES,
        examples={"text": {"input": "def add(a, b):", "instructions": "Write Python."}},
    ),
    Operation(
        "GET",
        PATH,
        "Return a stored response.",
        ResponseReply,
        errors=(400, 404, 501, 503),
        parameters=(
            _RESPONSE_ID,
            in_query_text("stream", "Streams are not supported.", enum=["false"]),
        ),
    ),
    Operation(
        "DELETE",
        PATH,
        "Delete a stored response.",
        DeletedResponse,
        errors=(404, 501, 503),
        parameters=(_RESPONSE_ID,),
    ),
    Operation(
        "GET",
        ITEMS_PATH,
        "List the input items of a stored response.",
        InputItemList,
        errors=(400, 404, 501, 503),
        parameters=(
            _RESPONSE_ID,
            in_query("limit", "Number of items.", DEFAULT_ITEMS, MOST_ITEMS),
            in_query_text("order", "The order of the items.", enum=list(ORDERS), default="desc"),
            in_query_text("after", "The id of the item that precedes the page."),
        ),
    ),
    *STORAGE_OPERATIONS,
    Operation(
        "POST",
        MESSAGES_PATH,
        "Create a message in Anthropic's format.",
        MessageReply,
        MessagesBody,
        MessageEvent,
        errors=OF_GENERATION,
        error=MessageErrorReply,
        examples={
            "whole": {"messages": _HELLO, "max_tokens": 16, "temperature": 0},
            "streamed": {
                "system": [{"type": "text", "text": "Write Python."}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "x = "}]}],
                "max_tokens": 16,
                "stop_sequences": ["\n\n"],
                "metadata": {"user_id": "example"},
                "stream": True,
            },
        },
    ),
    Operation(
        "POST",
        COUNT_PATH,
        "Count the input tokens of a message.",
        MessageTokensReply,
        CountTokensBody,
        errors=OF_BODIES,
        error=MessageErrorReply,
        examples={"text": {"messages": _HELLO, "system": "Write Python."}},
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "Create embeddings of texts, which are normalised vectors.",
        EmbeddingList,
        EmbeddingBody,
        errors=OF_GENERATION,
    ),
    *_with_aliases(
        RERANK_PATHS,
        "Sort documents by their relevance to a query, according to a cross-encoder.",
        RerankReply,
        RerankBody,
    ),
    *_with_aliases(
        SCORE_PATHS,
        "Score pairs of texts, by a cross-encoder or by the cosine of their embeddings.",
        ScoreList,
        ScoreBody,
    ),
    Operation(
        "GET",
        "/v1/models",
        "List the models, in Anthropic's format for requests with `anthropic-version`.",
        ModelList,
        errors=(503,),
    ),
    Operation(
        "GET",
        "/v1/models/{model}",
        "Describe a model, in Anthropic's format for requests with `anthropic-version`.",
        ModelReply,
        errors=(404, 503),
        parameters=(in_path("model"),),
    ),
    Operation(
        "POST",
        "/tokenize",
        "Return the token ids of a prompt, or of messages in the model's chat template.",
        TokenizeReply,
        TokenizeBody,
        errors=OF_BODIES,
        examples={
            "text": {"prompt": "def add(a, b):", "add_special_tokens": False},
            "chat": {"messages": _HELLO},
        },
    ),
    Operation(
        "POST",
        "/detokenize",
        "Return the text of token ids.",
        DetokenizeReply,
        DetokenizeBody,
        errors=OF_BODIES,
        examples={"tokens": {"tokens": [5, 6, 7]}},
    ),
    Operation(
        "GET", "/health", "Report whether the node works.", HealthReply, open=True, unready=True
    ),
    Operation(
        "GET",
        "/ready",
        "Report whether the node accepts requests.",
        ReadyReply,
        open=True,
        unready=True,
    ),
    Operation("GET", "/version", "Return the version.", VersionReply, open=True, errors=(403,)),
    Operation("GET", "/metrics", "Return the metrics in Prometheus' text format.", ("text/plain",)),
    Operation(
        "GET",
        "/decisions",
        "Return the latest decisions about speculation and their inputs.",
        DecisionList,
        errors=(400,),
        parameters=(in_query("limit", "Number of decisions.", SHOWN, KEPT),),
    ),
    Operation(
        "GET",
        "/live",
        "Stream the node's samples of the last minutes, and then one sample per second.",
        reply=(),
        events=NodeSample,
        errors=(400,),
        parameters=(in_query("interval", "Seconds between two samples.", 1, MOST_INTERVAL_S),),
    ),
    Operation(
        "GET",
        "/workers",
        "Return the workers of the pool, the streams of this node, and their latest moves.",
        WorkerList,
    ),
    Operation(
        "PUT",
        "/workers/{worker_id}/role",
        "Set the phase of requests that a worker prefers.",
        ListedWorker,
        WorkerRoleBody,
        errors=(400, 404, 408, 409, 413, 503),
        parameters=(in_path("worker_id"),),
    ),
    Operation(
        "GET",
        "/records",
        "List the latest requests, newest first.",
        RequestList,
        errors=(400,),
        parameters=(
            in_query("limit", "Number of requests.", SHOWN, KEPT),
            *(in_query_text(name, text) for name, text in FILTERS.items()),
        ),
    ),
    Operation(
        "GET",
        "/records/{request_id}",
        "Return one of the latest requests, with its phases, steps, decisions and moves.",
        RequestDetail,
        errors=(404,),
        parameters=(_REQUEST_ID,),
    ),
    Operation(
        "GET",
        "/session",
        "Return the session of the browser.",
        SessionReply,
        open=True,
        errors=(403,),
    ),
    Operation(
        "POST",
        "/session",
        "Log a browser in, whose cookie then stands for its API key.",
        SessionReply,
        SessionBody,
        open=True,
        errors=(400, 401, 403, 408, 413),
    ),
    Operation(
        "DELETE",
        "/session",
        "Log a browser out, and delete its cookie.",
        SessionReply,
        open=True,
        errors=(403,),
    ),
    *ADMINISTRATION,
    *(
        Operation(
            "GET", path, summary, ("text/html",), open=True, errors=(403, 404), parameters=names
        )
        for path, summary, names in (
            ("/", "Return the live page.", ()),
            ("/requests", "Return the page with the latest requests.", ()),
            ("/requests/{request_id}", "Return the page of a request.", (_REQUEST_ID,)),
            ("/operations", "Return the page with models, queue, usage and quotas.", ()),
            ("/docs", "Return the page that describes the API.", ()),
            ("/login", "Return the page for logging in.", ()),
        )
    ),
    Operation(
        "GET",
        "/web/{name}",
        "Return a file of the pages.",
        ("text/css", "text/html", "text/javascript", "image/svg+xml"),
        open=True,
        errors=(403, 404),
        parameters=(in_path("name", enum=file_names()),),
    ),
    Operation("GET", "/openapi.json", "Return this document.", ("application/json",)),
)
