"""The endpoint `POST /score` of vLLM, which scores pairs of texts in the order of the request.

A cross-encoder reads each pair. With an embedding model, the score is the cosine of the angle
between the vectors of both texts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np

from draftgate.backends.core.admission import refusal
from draftgate.backends.errors import BackendFailed
from draftgate.backends.types import ModelCard, Task
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import UnsupportedTask, invalid
from draftgate.gateway.http.direct import Request, Response
from draftgate.gateway.http.endpoints.embeddings import unit_vector
from draftgate.gateway.http.generation import (
    INLINE_BODY_BYTES,
    WatchedEndpoint,
    parse_request,
    send_json,
)
from draftgate.gateway.http.pairs import pairs_job
from draftgate.gateway.http.pooling import Pooled, pooled_results, pooling_job
from draftgate.gateway.http.replies.rendering import encode
from draftgate.gateway.http.replies.shapes import PromptUsage, ScoreList, ScoreReply
from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.limits import MAX_RERANKED_DOCUMENTS, check_ranges
from draftgate.gateway.http.requests.prompt_encoding import too_long
from draftgate.gateway.http.requests.schemas import ScoreBody
from draftgate.gateway.http.requests.validation import ParsedRequest, prompts_of
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.offload import offload
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.telemetry.watch import RequestWatch

PATHS: Final = ("/score", "/v1/score")

FORMS: Final = (
    ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"),
)  # fmt: skip
"""The names of the first and the second texts, of which a request uses one pair."""

_decoder: Final = msgspec.json.Decoder(ScoreBody)


class ScoreEndpoint(WatchedEndpoint):
    """The endpoint that scores pairs."""

    path = PATHS[0]
    operation = "score"
    task = Task.SCORE
    alternative = Task.EMBED

    async def respond(self, request: Request, model: ModelService, watch: RequestWatch) -> Response:
        """Respond to a request.

        Raises:
            GatewayError, RequestRejected, BackendFailed: as for requests that generate text.
        """
        parse = partial(parse_score, model.fleet.card)
        parsed = await parse_request(request, model.served, parse, watch, INLINE_BODY_BYTES)
        wire = parsed.body
        assert isinstance(wire, ScoreBody)
        names, _ = _texts(wire)
        watch.responds(_response_id(parsed.job))
        pooled = await pooled_results(model, parsed.job, watch, names[1])
        reply = partial(score_reply, parsed, pooled, watch.prompt_tokens, int(time.time()))
        return await send_json(request, await offload(reply))


SCORE: Final = ScoreEndpoint()


def parse_score(card: ModelCard, body: bytes, served: ServedModel, sender: Sender) -> ParsedRequest:
    """Return the parsed form of the body of a score request.

    Args:
        card: the model, whose tasks decide how to score.

    Raises:
        InvalidRequest: the request is malformed, or too large.
        UnsupportedTask: the model has neither scores nor embeddings.
    """
    wire = decode(body, _decoder)
    served.check_name(wire.model)
    check_ranges(wire)
    names, texts = _texts(wire)
    tasks = card.capabilities.tasks
    if Task.SCORE in tasks:
        job = pairs_job(texts, names, served, sender, wire.priority, wire.max_tokens_per_doc)
        return ParsedRequest(job, served, body=wire)
    if Task.EMBED not in tasks:
        raise UnsupportedTask(refusal(Task.SCORE, tasks))
    given: list[str | int | list[int]] = [*dict.fromkeys(text for pair in texts for text in pair)]
    vectors = prompts_of(names[1], given, served, prefix=card.prompt(""))
    for vector in vectors:
        if len(vector) > served.max_model_len:
            raise too_long(names[1], served.max_model_len, str(len(vector)))
    return ParsedRequest(pooling_job(Task.EMBED, vectors, sender, wire.priority), served, body=wire)


def _texts(wire: ScoreBody) -> tuple[tuple[str, str], list[tuple[str, str]]]:
    """Return the names of both parts, and the pairs: one to one, one to many, or in parallel.

    Raises:
        InvalidRequest: a part is missing, or their lengths differ.
    """
    for names in FORMS:
        values = [getattr(wire, name) for name in names]
        if None not in values:
            first, second = ([value] if isinstance(value, str) else value for value in values)
            break
    else:
        known = " or ".join(" and ".join(names) for names in FORMS)
        raise invalid("text_1", f"must be given; send {known}")
    if not 1 <= len(second) <= MAX_RERANKED_DOCUMENTS:
        words = f"must have 1 to {MAX_RERANKED_DOCUMENTS} texts, not {len(second)}"
        raise invalid(names[1], words)
    if len(first) not in {1, len(second)}:
        words = f"must have one text or {len(second)}, as {names[1]} has, not {len(first)}"
        raise invalid(names[0], words)
    repeated = first * len(second) if len(first) == 1 else first
    return names, list(zip(repeated, second, strict=True))


def _response_id(job: Job) -> str:
    return f"score-{job.request_id}"


def score_reply(parsed: ParsedRequest, pooled: Pooled, prompt_tokens: int, created_s: int) -> bytes:
    """Return the JSON of a response.

    Args:
        pooled: score of each pair, or hidden state of each distinct text.
        prompt_tokens: tokens of all prompts.

    Raises:
        BackendFailed: a score is not finite.
    """
    scores = list(_scores(parsed, pooled.results))
    if not np.isfinite(scores).all():
        raise BackendFailed("a score is not finite")
    data = [ScoreReply(index, score) for index, score in enumerate(scores)]
    usage = PromptUsage(prompt_tokens, prompt_tokens)
    response_id, name = _response_id(parsed.job), parsed.served.name
    return encode(ScoreList(response_id, created_s, name, data, usage, metrics=pooled.metrics))


def _scores(parsed: ParsedRequest, pooled: Sequence[bytes]) -> Iterator[float]:
    if parsed.job.task is Task.SCORE:
        yield from np.frombuffer(b"".join(pooled), "<f4").tolist()
        return
    wire = parsed.body
    assert isinstance(wire, ScoreBody)
    _, texts = _texts(wire)
    given = dict.fromkeys(text for pair in texts for text in pair)
    vectors = {
        text: unit_vector(state, None).astype(np.float64)
        for text, state in zip(given, pooled, strict=True)
    }
    for first, second in texts:
        yield float(vectors[first] @ vectors[second])
