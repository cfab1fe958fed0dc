"""Log probabilities of tokens, in the layouts of the endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from draftgate.backends.types import TokenLogprob
from draftgate.gateway.http.replies.shapes import TokenLogprobReply, TopLogprob
from draftgate.gateway.http.requests.validation import ParsedRequest

TOKEN_ID: Final = "token_id:{}"
"""The name of a token by its id, as in vLLM."""


def token_namer(parsed: ParsedRequest) -> Callable[[int], str]:
    """Return the function that names a token of a chat: by its text, or by its id."""
    return TOKEN_ID.format if parsed.tokens_as_ids else parsed.served.tokenizer.token_text


def key_namer(parsed: ParsedRequest) -> Callable[[int], str]:
    """Return the function that names a token of a completion, where names are keys.

    Parts of characters have no text, so their names are their bytes (`TokenBytes.name`).
    """
    return TOKEN_ID.format if parsed.tokens_as_ids else parsed.served.tokenizer.bytes.name


def token_logprobs(
    entries: Sequence[TokenLogprob], parsed: ParsedRequest
) -> list[TokenLogprobReply]:
    """Return the log probabilities of tokens with their names and raw bytes.

    Args:
        entries: the tokens, with the most likely alternatives.
    """
    name, raw = token_namer(parsed), parsed.served.tokenizer.bytes

    def spelled(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(name(token_id), logprob, list(raw[token_id]))

    replies = []
    for entry in entries:
        chosen = spelled(entry.token_id, entry.logprob)
        top = [spelled(token_id, logprob) for token_id, logprob in entry.top]
        replies.append(TokenLogprobReply(chosen.token, chosen.logprob, chosen.bytes, top))
    return replies


def top_by_name(
    token_id: int, logprob: float, top: Sequence[tuple[int, float]], name: Callable[[int], str]
) -> dict[str, float]:
    """Return the log probabilities of the likeliest tokens and of one token, by name.

    Of several tokens with the same name, the likeliest keeps it, and the others are named by their
    ids. Otherwise, an unlikely token would hide that another token is the likeliest, which
    evaluations read here.

    Args:
        token_id: the token.
        logprob: log probability of the token.
        top: ids and log probabilities of the likeliest tokens, descending.
        name: returns the name of a token (`key_namer`).
    """
    found: dict[str, float] = {}
    for other, value in (dict(top) | {token_id: logprob}).items():  # in the order of `top`
        key = name(other)
        found[TOKEN_ID.format(other) if key in found else key] = value
    return found
