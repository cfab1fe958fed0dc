"""Targets: the bodies of requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from multidict import CIMultiDict

from draftgate.backends.errors import RequestRejected
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Capabilities, ModelCard
from draftgate.compressed import SLICE_BYTES, BodyDecoder, CompressionError
from draftgate.gateway.accounts import ANONYMOUS
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.content_encoding import body_encoding
from draftgate.gateway.http.endpoints.embeddings import parse_embeddings
from draftgate.gateway.http.endpoints.models import _detokenize, _tokenize
from draftgate.gateway.http.endpoints.rerank import parse_rerank
from draftgate.gateway.http.requests.anthropic import parse_count_tokens, parse_messages
from draftgate.gateway.http.requests.conversation import conversation, encode, items_of
from draftgate.gateway.http.requests.forwarded import changed_fields, read_fields, rewrite_body
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.responses import parse_responses
from draftgate.gateway.http.requests.validation import parse_chat, parse_completion
from draftgate.gateway.served_model import ServedModel
from tests.fuzz.mutation import JSON
from tests.fuzz.target import Target
from tests.gateway.tool_models import with_template

SENDER = Sender("id")
CARD = ModelCard("m", "m", 8192, None, 0, Capabilities(embedding_size=64))

with TemporaryDirectory() as directory:
    TOKENIZER = Tokenizer(with_template(Path(directory) / "model", "qwen3"))
SERVED = ServedModel("m", TOKENIZER, 8192)


def parsed(parse: Callable[..., Any], data: bytes) -> None:
    """Parse a body into a job whose prompts are token ids of the model."""
    job = parse(data, SERVED, SENDER).job
    assert job.prompts
    assert all(0 <= token < TOKENIZER.vocab_size for prompt in job.prompts for token in prompt)


def continued(data: bytes) -> None:
    """Parse a body of `/v1/responses`, store its conversation, and read it for the next request."""
    parse_responses(data, SERVED, SENDER)
    items = conversation(data, None, "id")
    stored = b'{"items":%s,"response":%s}' % (items, encode({"output": []}))
    items_of(stored)
    conversation(b'{"input":"more"}', stored, "id-2")


def forwarded(data: bytes) -> None:
    """Read the fields of a body for an upstream, and change some."""
    fields = read_fields(data, 8192)
    changed = changed_fields(fields, ((), "other"), ANONYMOUS)
    if changed:
        rewrite_body(data, changed)


def encoded(data: bytes) -> None:
    """Decode a body whose encoding is the first line, up to the limit of a body."""
    value, _, body = data.partition(b"\n")
    headers = CIMultiDict({"Content-Encoding": value.decode("utf-8", "surrogateescape")})
    encoding = body_encoding(headers)
    if encoding is None:
        return
    decoder, left = BodyDecoder(encoding), 1 << 20
    for part in (body[:1000], body[1000:]):
        decoder.add(part)
        while decoder.pending and left >= 0:
            decoded = decoder.decode(left + 1)
            assert len(decoded) <= min(SLICE_BYTES, left + 1)
            left -= len(decoded)
    decoder.finish()


PARSERS = {
    "chat": partial(parsed, parse_chat),
    "completions": partial(parsed, parse_completion),
    "responses": continued,
    "messages": partial(parsed, parse_messages),
    "count_tokens": partial(parsed, parse_count_tokens),
    "embeddings": partial(parsed, partial(parse_embeddings, CARD)),
    "rerank": partial(parsed, parse_rerank),
    "tokenize": lambda data: _tokenize(data, SERVED),
    "detokenize": lambda data: _detokenize(data, SERVED),
    "forwarded": forwarded,
}

TARGETS = [
    *(
        Target(name, parse, (InvalidRequest, RequestRejected), JSON)
        for name, parse in PARSERS.items()
    ),
    Target("content_encoding", encoded, (InvalidRequest, CompressionError)),
]
