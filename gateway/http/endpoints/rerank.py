"""The endpoint `POST /v1/rerank`, which sorts documents by their relevance to a query.

The model is a cross-encoder, which reads the query together with each document. A pair is a prompt
of its own, so pairs are queued, batched and charged like the texts of an embedding request. They
are online work, because a user usually waits for the documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
from aiohttp import web

from draftgate.backends.errors import BackendFailed
from draftgate.backends.pair_encoder import TextPair
from draftgate.backends.token_ids import compact
from draftgate.backends.types import Task
from draftgate.gateway.errors import ContextTooLong, invalid
from draftgate.gateway.http.generation import (
    INLINE_BODY_BYTES,
    WatchedEndpoint,
    offload_if_long,
    parse_request,
    send_json,
)
from draftgate.gateway.http.pooling import pooled_results, pooling_job
from draftgate.gateway.http.replies.rendering import encode
from draftgate.gateway.http.replies.shapes import PromptUsage, RerankReply, RerankResult
from draftgate.gateway.http.requests.decoding import decode, reject_unsupported
from draftgate.gateway.http.requests.limits import (
    MAX_RERANKED_DOCUMENTS,
    MAX_RERANKED_TOKENS,
    check_ranges,
)
from draftgate.gateway.http.requests.prompt_encoding import too_long
from draftgate.gateway.http.requests.schemas import (
    RerankBody,
    RerankDocument,
    UnsupportedRerankFields,
)
from draftgate.gateway.http.requests.sender import Sender
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.offload import stop_if_abandoned
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

    async def respond(
        self, request: web.Request, model: ModelService, watch: RequestWatch
    ) -> web.StreamResponse:
        """Respond to a request.

        Raises:
            GatewayError, RequestRejected, BackendFailed: as for requests that generate text.
        """
        # A short body may have a thousand documents, and each pair repeats the query. Encoding the
        # longest pairs takes 70 to 100 ms (one core, AMD EPYC Zen 5, 2026-11-27).
        in_a_thread = INLINE_BODY_BYTES
        parsed = await parse_request(request, model.served, parse_rerank, watch, in_a_thread)
        scores = await pooled_results(model, parsed.job, watch, "documents")
        reply = partial(rerank_reply, parsed, scores, watch.prompt_tokens)
        return await send_json(request, await offload_if_long(reply, _document_characters(parsed)))


RERANK: Final = RerankEndpoint()


def parse_rerank(body: bytes, served: ServedModel, sender: Sender) -> ParsedRequest:
    """Return the parsed form of the body of a rerank request.

    Raises:
        InvalidRequest: the request is malformed, or too large.
    """
    wire = decode(body, _decoder)
    served.check_name(wire.model)
    reject_unsupported(wire, UnsupportedRerankFields.__struct_fields__)
    check_ranges(wire)
    count = len(wire.documents)
    if not 1 <= count <= MAX_RERANKED_DOCUMENTS:
        raise invalid("documents", f"must have 1 to {MAX_RERANKED_DOCUMENTS} texts, not {count}")
    pairs = list(_pairs(wire, served))
    prompts = tuple([compact(pair.token_ids) for pair in pairs])
    segments = tuple([pair.second_segment for pair in pairs])
    job = pooling_job(Task.SCORE, prompts, sender, wire.priority, segments)
    return ParsedRequest(job, served, body=wire)


def _pairs(wire: RerankBody, served: ServedModel) -> Iterator[TextPair]:
    """Yield the pair of the query with each document, whose end is cut off to fit.

    Raises:
        InvalidRequest: the query is empty or too long, or the pairs have too many tokens.
        Abandoned: the client has disconnected.
    """
    tokenizer, longest = served.tokenizer, served.max_model_len
    if not wire.query:
        raise invalid("query", "must not be empty")
    if (least := tokenizer.least_tokens(wire.query)) > longest:
        raise too_long("query", longest, f"at least {least}")
    encoder = tokenizer.pairs(wire.query, longest)
    if encoder.room_tokens < 1:
        raise ContextTooLong(
            f"query: this model's maximum context length is {longest} tokens, but the query has "
            f"{encoder.first_tokens}, which leaves none for a document",
            "query",
        )
    tokens = 0
    for document in wire.documents:
        stop_if_abandoned()
        text = tokenizer.beginning(_text(document), longest)
        pair = encoder.encode(text, wire.max_tokens_per_doc or None)
        tokens += len(pair.token_ids)
        if tokens > MAX_RERANKED_TOKENS:
            raise invalid(
                "documents",
                f"the query with each document has more than {MAX_RERANKED_TOKENS} tokens in "
                "total; send fewer documents in a request, or a smaller max_tokens_per_doc",
            )
        yield pair


def _text(document: str | RerankDocument) -> str:
    return document if isinstance(document, str) else document.text


def _document_characters(parsed: ParsedRequest) -> int:
    wire = parsed.body
    assert isinstance(wire, RerankBody)
    return sum(len(_text(document)) for document in wire.documents)


def rerank_reply(parsed: ParsedRequest, scores: Sequence[bytes], prompt_tokens: int) -> bytes:
    """Return the JSON of a response.

    Args:
        scores: score of each document, as little-endian float32.
        prompt_tokens: tokens of all pairs.

    Raises:
        BackendFailed: a score is not finite.
    """
    wire = parsed.body
    assert isinstance(wire, RerankBody)
    values = np.frombuffer(b"".join(scores), "<f4")
    if not np.isfinite(values).all():
        raise BackendFailed("a score is not finite")
    # Equal scores keep the order of the documents.
    order = np.argsort(-values, kind="stable")[: wire.top_n or None]
    results = [RerankResult(int(index), float(values[index])) for index in order]
    if wire.return_documents is not False:
        for result in results:
            result.document = RerankDocument(_text(wire.documents[result.index]))
    usage = PromptUsage(prompt_tokens, prompt_tokens)
    return encode(
        RerankReply(f"rerank-{parsed.job.request_id}", parsed.served.name, usage, results)
    )
