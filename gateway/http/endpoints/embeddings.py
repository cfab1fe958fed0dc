"""The endpoint `POST /v1/embeddings`, which returns normalised hidden states of texts.

`input_type` selects the prompt that the model puts before a text, and the class of the work. A
document is batch work unless the client sets a priority: it waits for all requests of the usual
priority. A query and a text without a type are online work.

The gateway keeps embeddings of earlier texts (`gateway.embedding_cache`), if the numerics class of
the workers is known. Texts with a cached embedding need no worker, and count against no quota.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from draftgate.backends.errors import BackendFailed
from draftgate.backends.types import ModelCard, Task
from draftgate.gateway.embedding_cache import EmbeddingCache, embedding_key
from draftgate.gateway.errors import invalid
from draftgate.gateway.http.context import NODE
from draftgate.gateway.http.direct import Request, Response
from draftgate.gateway.http.generation import WatchedEndpoint, parse_request, send_json
from draftgate.gateway.http.pooling import Pooled, pooled_results, pooling_job
from draftgate.gateway.http.replies.metric_shapes import PoolingMetrics
from draftgate.gateway.http.replies.rendering import encode
from draftgate.gateway.http.replies.shapes import EmbeddingList, EmbeddingReply, PromptUsage
from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.limits import MAX_EMBEDDED_TEXTS, Range, check_ranges
from draftgate.gateway.http.requests.prompt_encoding import too_long
from draftgate.gateway.http.requests.schemas import EmbeddingBody
from draftgate.gateway.http.requests.validation import ParsedRequest, prompts_of
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.offload import offload
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.watch import RequestWatch
from draftgate.policies.types import BATCH_PRIORITY
from draftgate.policies.values import replace

_PATH: Final = "/v1/embeddings"

INLINE_STATE_BYTES: Final = 64 << 10
"""Longer responses are encoded in a thread. 16384 numbers take 0.8 ms as decimals, or 0.2 ms as
base64 (one core of an AMD EPYC Zen 4, 2026-11-21)."""

_decoder: Final = msgspec.json.Decoder(EmbeddingBody)
_WIRE: Final = np.dtype("<f4")


class EmbeddingsEndpoint(WatchedEndpoint):
    """The endpoint that embeds texts."""

    path = _PATH
    operation = "embeddings"
    task = Task.EMBED

    async def respond(self, request: Request, model: ModelService, watch: RequestWatch) -> Response:
        """Respond to a request.

        Raises:
            GatewayError, RequestRejected, BackendFailed: as for requests that generate text.
        """
        parse = partial(parse_embeddings, model.fleet.card)
        parsed = await parse_request(request, model.served, parse, watch)
        pooled = await _states(request.app[NODE].embeddings, model, parsed, watch)
        reply = partial(embeddings_reply, parsed, pooled, watch.prompt_tokens)
        short = sum(map(len, pooled.results)) <= INLINE_STATE_BYTES
        return await send_json(request, reply() if short else await offload(reply))


EMBEDDINGS: Final = EmbeddingsEndpoint()


def parse_embeddings(
    card: ModelCard, body: bytes, served: ServedModel, sender: Sender
) -> ParsedRequest:
    """Return the parsed form of the body of an embedding request.

    Args:
        card: the model, with its prompts and the size of its embeddings.

    Raises:
        InvalidRequest: the request is malformed.
    """
    wire = decode(body, _decoder)
    served.check_name(wire.model)
    check_ranges(wire)
    Range(1, card.capabilities.embedding_size).check("dimensions", wire.dimensions)
    given = wire.input
    are_texts = isinstance(given, list) and not all(isinstance(item, int) for item in given)
    if given is not None and are_texts and len(given) > MAX_EMBEDDED_TEXTS:
        raise invalid("input", f"must have at most {MAX_EMBEDDED_TEXTS} texts, not {len(given)}")
    special = wire.add_special_tokens is not False
    prefix = card.prompt(wire.input_type or "")
    prompts = prompts_of("input", given, served, add_special_tokens=special, prefix=prefix)
    for index, prompt in enumerate(prompts):
        if len(prompt) > served.max_model_len:
            name = f"input[{index}]" if len(prompts) > 1 else "input"
            raise too_long(name, served.max_model_len, str(len(prompt)))
    job = pooling_job(Task.EMBED, prompts, sender, _priority(wire))
    return ParsedRequest(job, served, body=wire)


def _priority(wire: EmbeddingBody) -> int | None:
    """Return the priority of a request, or None for that of its headers."""
    batch = wire.input_type == "document" and wire.priority is None
    return BATCH_PRIORITY if batch else wire.priority


async def _states(
    cache: EmbeddingCache, model: ModelService, parsed: ParsedRequest, watch: RequestWatch
) -> Pooled:
    """Return the pooled hidden state of each text, from the cache or from a worker.

    If the cache has all of them, the request does not join its flow.

    Raises:
        RequestRejected: a text can never be embedded.
        Overloaded, QuotaExceeded: the request is rejected for now.
        BackendFailed: a worker failed.
    """
    job, numerics = parsed.job, model.fleet.card.numerics_class
    if not cache.is_on or numerics is None:
        return await pooled_results(model, job, watch, "input")
    wire = parsed.body
    assert isinstance(wire, EmbeddingBody)
    kind = wire.input_type or ""
    keys = [embedding_key(numerics, job.tenant, kind, prompt) for prompt in job.prompts]
    states = {key: state for key in keys if (state := cache.get(key)) is not None}
    # A text that occurs twice is computed once.
    by_key = dict(zip(keys, job.prompts, strict=True))
    missing = {key: prompt for key, prompt in by_key.items() if key not in states}
    hits = sum(key in states for key in keys)
    model.metrics.add(metric.EMBEDDING_HITS, hits)
    model.metrics.add(metric.EMBEDDING_MISSES, len(keys) - hits)
    metrics: PoolingMetrics | UnsetType = UNSET
    if missing:
        rest = replace(job, prompts=tuple(missing.values()))
        computed, metrics = await pooled_results(model, rest, watch, "input")
        for key, state in zip(missing, computed, strict=True):
            states[key] = state
            if np.isfinite(np.frombuffer(state, _WIRE)).all():  # the next attempt may succeed
                cache.put(key, state)
        model.metrics.set(metric.EMBEDDING_BYTES, cache.num_bytes)
    return Pooled([states[key] for key in keys], metrics)


def embeddings_reply(parsed: ParsedRequest, pooled: Pooled, prompt_tokens: int) -> bytes:
    """Return the JSON of a response.

    Args:
        pooled: pooled hidden states, in the order of the texts.
        prompt_tokens: tokens of all texts.

    Raises:
        BackendFailed: a state is not finite.
    """
    wire = parsed.body
    assert isinstance(wire, EmbeddingBody)
    data = []
    # Encode the vectors one by one, because encoding holds the GIL.
    for index, state in enumerate(pooled.results):
        vector = unit_vector(state, wire.dimensions)
        if wire.encoding_format == "base64":
            shown = encode(base64.b64encode(vector.tobytes()).decode())
        else:
            shown = encode(vector.tolist())
        data.append(EmbeddingReply(index, msgspec.Raw(shown)))
    usage = PromptUsage(prompt_tokens, prompt_tokens)
    return encode(EmbeddingList(data, parsed.served.name, usage, metrics=pooled.metrics))


def unit_vector(state: bytes, dimensions: int | None) -> npt.NDArray[np.float32]:
    """Return a pooled hidden state as a vector of length 1.

    A vector with fewer dimensions is normalised again. Models trained for shorter vectors
    (Matryoshka, arXiv 2205.13147) keep most of their meaning in the first dimensions.

    Args:
        state: float32 values in little-endian order.
        dimensions: number of leading values to keep, or None for all.

    Raises:
        BackendFailed: the state is not finite.
    """
    vector = np.frombuffer(state, _WIRE)[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length):
        raise BackendFailed("a hidden state is not finite")
    return (vector / length if length else vector).astype(_WIRE)
