"""The table of operations: what each path takes and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from draftgate.gateway.dispatch.decisions import KEPT, DecisionList
from draftgate.gateway.http.endpoints.live import MOST_INTERVAL_S, SHOWN
from draftgate.gateway.http.endpoints.page import file_names
from draftgate.gateway.http.replies.responses import ResponseEvent, ResponseReply
from draftgate.gateway.http.replies.shapes import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    EmbeddingList,
    HealthReply,
    ModelList,
    ModelReply,
    ReadyReply,
    TokenizeReply,
    VersionReply,
)
from draftgate.gateway.http.requests.responses import ResponsesBody
from draftgate.gateway.http.requests.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)


@dataclass(frozen=True)
class Operation:
    """What one method of one path does.

    Attributes:
        reply: what it answers with 200: a struct, or the names of content types.
        body: what it takes.
        events: the data of its server-sent events, where it streams.
        open: whether it needs no API key where there are some.
        unready: whether it answers the same with 503 while the node takes no requests.
        errors: statuses of answers in the shape of an error.
        parameters: of path and query, as OpenAPI writes them.
        examples: bodies by name; each of them works on any model.
    """

    method: str
    path: str
    summary: str
    reply: Any
    body: Any = None
    events: Any = None
    open: bool = False
    unready: bool = False
    errors: tuple[int, ...] = ()
    parameters: tuple[Mapping[str, Any], ...] = ()
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A name that no other operation has."""
        words = [w for w in self.path.replace("{", "").replace("}", "").split("/") if w != "v1"]
        return "_".join([self.method.lower(), *filter(None, words)])


OF_BODIES: Final = (400, 404, 413, 503)
OF_GENERATION: Final = (400, 404, 413, 429, 503)
_HELLO: Final = [{"role": "user", "content": "def add(a, b):"}]

OPERATIONS: Final = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answers a conversation.",
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
        "Goes on with a text, or with several.",
        CompletionReply,
        CompletionBody,
        CompletionReply,
        errors=OF_GENERATION,
        examples={
            "whole": {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0},
            "several": {"prompt": ["import ", "class "], "n": 2, "max_tokens": 8, "stop": ["\n\n"]},
            "streamed": {"prompt": "for i in ", "max_tokens": 16, "stream": True, "priority": -1},
        },
    ),
    Operation(
        "POST",
        "/v1/responses",
        "Answers an input; nothing is stored.",
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
        },
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "Embeds texts: the last token's hidden state, at length 1.",
        EmbeddingList,
        EmbeddingBody,
        errors=OF_GENERATION,
    ),
    Operation("GET", "/v1/models", "Lists the model.", ModelList, errors=(503,)),
    Operation(
        "GET",
        "/v1/models/{model}",
        "Describes the model.",
        ModelReply,
        errors=(404, 503),
        parameters=(
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}},
        ),
    ),
    Operation(
        "POST",
        "/tokenize",
        "Tells the token ids of a prompt, or of messages in the model's chat template.",
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
        "Tells the text of token ids.",
        DetokenizeReply,
        DetokenizeBody,
        errors=OF_BODIES,
        examples={"tokens": {"tokens": [5, 6, 7]}},
    ),
    Operation(
        "GET",
        "/health",
        "Whether the process is worth keeping.",
        HealthReply,
        open=True,
        unready=True,
    ),
    Operation(
        "GET", "/ready", "Whether new requests are welcome.", ReadyReply, open=True, unready=True
    ),
    Operation("GET", "/version", "The version.", VersionReply, open=True),
    Operation("GET", "/metrics", "Figures in Prometheus' text format.", "text/plain"),
    Operation(
        "GET",
        "/decisions",
        "The latest decisions about speculation, and what they were made from.",
        DecisionList,
        errors=(400,),
        parameters=(
            {
                "name": "limit",
                "in": "query",
                "schema": {"type": "integer", "minimum": 1, "maximum": KEPT, "default": SHOWN},
            },
        ),
    ),
    Operation(
        "GET",
        "/live",
        "Samples of the node for its page: those of the last minutes, then one each second.",
        "text/event-stream",
        errors=(400,),
        parameters=(
            {
                "name": "interval",
                "in": "query",
                "description": "Seconds between two samples.",
                "schema": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MOST_INTERVAL_S,
                    "default": 1,
                },
            },
        ),
    ),
    Operation("GET", "/", "The live page.", "text/html"),
    Operation(
        "GET",
        "/web/{name}",
        "A file of the live page.",
        ("text/css", "text/html", "text/javascript", "image/svg+xml"),
        errors=(404,),
        parameters=(
            {
                "name": "name",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "enum": file_names()},
            },
        ),
    ),
    Operation("GET", "/openapi.json", "This document.", "application/json"),
)
