"""The endpoint `POST /v1/rerank`, which sorts documents by their relevance to a query.

The model is a cross-encoder, which reads the query together with each document. A pair is a prompt
of its own, so pairs are queued, batched and charged like the texts of an embedding request. They
are online work, because a user usually waits for the documents.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec
import numpy as np

from draftgate.backends.errors import BackendFailed
from draftgate.backends.types import Task
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import invalid
from draftgate.gateway.http.direct import Request, Response
from draftgate.gateway.http.generation import (
    INLINE_BODY_BYTES,
    WatchedEndpoint,
    offload_if_long,
    parse_request,
    send_json,
)
from draftgate.gateway.http.pairs import pairs_job
from draftgate.gateway.http.pooling import Pooled, pooled_results
from draftgate.gateway.http.replies.rendering import encode
from draftgate.gateway.http.replies.shapes import PromptUsage, RerankReply, RerankResult
from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.limits import (
    MAX_RERANKED_DOCUMENTS,
    check_ranges,
)
from draftgate.gateway.http.requests.schemas import RerankBody, RerankDocument
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.telemetry.watch import RequestWatch

PATHS: Final = ("/v1/rerank", "/rerank", "/v2/rerank")
"""The paths of vLLM: clients of Jina use the first one, and clients of Cohere the last one."""

_decoder: Final = msgspec.json.Decoder(RerankBody)


class RerankEndpoint(WatchedEndpoint):
    """The endpoint that sorts documents."""

    path = PATHS[0]
    operation = "rerank"
    task = Task.SCORE

    async def respond(self, request: Request, model: ModelService, watch: RequestWatch) -> Response:
        """Respond to a request.

        Raises:
            GatewayError, RequestRejected, BackendFailed: as for requests that generate text.
        """
        # A short body may have a thousand documents, and each pair repeats the query. Encoding the
        # longest pairs takes 70 to 100 ms (one core, AMD EPYC Zen 5, 2026-11-27).
        in_a_thread = INLINE_BODY_BYTES
        parsed = await parse_request(request, model.served, parse_rerank, watch, in_a_thread)
        watch.responds(_response_id(parsed.job))
        pooled = await pooled_results(model, parsed.job, watch, "documents")
        reply = partial(rerank_reply, parsed, pooled, watch.prompt_tokens)
        return await send_json(request, await offload_if_long(reply, _document_characters(parsed)))


RERANK: Final = RerankEndpoint()


def parse_rerank(body: bytes, served: ServedModel, sender: Sender) -> ParsedRequest:
    """Return the parsed form of the body of a rerank request.

    Raises:
        InvalidRequest: the request is malformed, or too large.
    """
    wire = decode(body, _decoder)
    served.check_name(wire.model)
    check_ranges(wire)
    count = len(wire.documents)
    if not 1 <= count <= MAX_RERANKED_DOCUMENTS:
        raise invalid("documents", f"must have 1 to {MAX_RERANKED_DOCUMENTS} texts, not {count}")
    texts = [(wire.query, _text(document)) for document in wire.documents]
    names, most_tokens = ("query", "documents"), wire.max_tokens_per_doc
    job = pairs_job(texts, names, served, sender, wire.priority, most_tokens)
    return ParsedRequest(job, served, body=wire)


def _text(document: str | RerankDocument) -> str:
    return document if isinstance(document, str) else document.text


def _document_characters(parsed: ParsedRequest) -> int:
    wire = parsed.body
    assert isinstance(wire, RerankBody)
    return sum(len(_text(document)) for document in wire.documents)


def _response_id(job: Job) -> str:
    return f"rerank-{job.request_id}"


def rerank_reply(parsed: ParsedRequest, pooled: Pooled, prompt_tokens: int) -> bytes:
    """Return the JSON of a response.

    Args:
        pooled: score of each document, as little-endian float32.
        prompt_tokens: tokens of all pairs.

    Raises:
        BackendFailed: a score is not finite.
    """
    wire = parsed.body
    assert isinstance(wire, RerankBody)
    values = np.frombuffer(b"".join(pooled.results), "<f4")
    if not np.isfinite(values).all():
        raise BackendFailed("a score is not finite")
    # Equal scores keep the order of the documents.
    order = np.argsort(-values, kind="stable")[: wire.top_n or None]
    results = [RerankResult(int(index), float(values[index])) for index in order]
    if wire.return_documents is not False:
        for result in results:
            result.document = RerankDocument(_text(wire.documents[result.index]))
    usage = PromptUsage(prompt_tokens, prompt_tokens)
    response_id, name = _response_id(parsed.job), parsed.served.name
    return encode(RerankReply(response_id, name, usage, results, pooled.metrics))
