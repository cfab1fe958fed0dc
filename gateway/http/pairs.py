"""Requests that score pairs of texts with a cross-encoder, within the bounds of a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from draftgate.backends.pair_encoder import PairEncoder, TextPair
from draftgate.backends.token_ids import compact
from draftgate.backends.types import Task
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import ContextTooLong, invalid
from draftgate.gateway.http.pooling import pooling_job
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.limits import MAX_RERANKED_TOKENS
from draftgate.gateway.http.requests.prompt_encoding import too_long
from draftgate.gateway.offload import stop_if_abandoned
from draftgate.gateway.served_model import ServedModel


def pairs_job(
    texts: Sequence[tuple[str, str]],
    params: tuple[str, str],
    served: ServedModel,
    sender: Sender,
    priority: int | None,
    max_tokens_per_doc: int | None,
) -> Job:
    """Return the job that scores pairs, whose second texts are cut off at their end to fit.

    Args:
        texts: the pairs, in which equal first texts follow each other.
        params: the client's names of the first and the second texts.
        priority: the priority in the body, or None.
        max_tokens_per_doc: maximum tokens of a second text, or None or 0 for as many as fit.

    Raises:
        InvalidRequest: a first text is empty or too long, or the pairs have too many tokens.
        Abandoned: the client has disconnected.
    """
    pairs = list(_encoded(texts, params, served, max_tokens_per_doc))
    prompts = tuple([compact(pair.token_ids) for pair in pairs])
    segments = tuple([pair.second_segment for pair in pairs])
    return pooling_job(Task.SCORE, prompts, sender, priority, segments)


def _encoded(
    texts: Sequence[tuple[str, str]],
    params: tuple[str, str],
    served: ServedModel,
    max_tokens_per_doc: int | None,
) -> Iterator[TextPair]:
    encoder: PairEncoder | None = None
    last, tokens = "", 0
    for first, second in texts:
        stop_if_abandoned()
        if encoder is None or first != last:
            encoder, last = _encoder(first, params[0], served), first
        text = served.tokenizer.beginning(second, served.max_model_len)
        pair = encoder.encode(text, max_tokens_per_doc or None)
        tokens += len(pair.token_ids)
        if tokens > MAX_RERANKED_TOKENS:
            raise invalid(
                params[1],
                f"the {params[0]} with each of the {params[1]} has more than {MAX_RERANKED_TOKENS} "
                "tokens in total; send fewer texts in a request, or a smaller max_tokens_per_doc",
            )
        yield pair


def _encoder(first: str, param: str, served: ServedModel) -> PairEncoder:
    longest = served.max_model_len
    if not first:
        raise invalid(param, "must not be empty")
    if (least := served.tokenizer.least_tokens(first)) > longest:
        raise too_long(param, longest, f"at least {least}")
    encoder = served.tokenizer.pairs(first, longest)
    if encoder.room_tokens < 1:
        raise ContextTooLong(
            f"{param}: this model's maximum context length is {longest} tokens, but the {param} "
            f"has {encoder.first_tokens}, which leaves none for a document",
            param,
        )
    return encoder
