"""Log probabilities of tokens, in the layouts of the endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftgate.backends.types import TokenLogprob
from draftgate.gateway.http.replies.shapes import TokenLogprobReply, TopLogprob
from draftgate.gateway.http.requests.validation import ParsedRequest


def token_namer(parsed: ParsedRequest) -> Callable[[int], str]:
    """Return the function that names a token: by its text, or by its id as in vLLM."""
    return "token_id:{}".format if parsed.tokens_as_ids else parsed.served.tokenizer.token_text


def token_logprobs(
    entries: Sequence[TokenLogprob], name: Callable[[int], str], unknown: list[int] | None = None
) -> list[TokenLogprobReply]:
    """Return the log probabilities of tokens with their names.

    Args:
        entries: the tokens, with the most likely alternatives.
        name: returns the name of a token (`token_namer`).
        unknown: the bytes of a token with part of a character, which has no text.
    """

    def spelled(token_id: int, logprob: float) -> TopLogprob:
        token = name(token_id)
        return TopLogprob(token, logprob, unknown if "\ufffd" in token else list(token.encode()))

    replies = []
    for entry in entries:
        chosen = spelled(entry.token_id, entry.logprob)
        top = [spelled(token_id, logprob) for token_id, logprob in entry.top]
        replies.append(TokenLogprobReply(chosen.token, chosen.logprob, chosen.bytes, top))
    return replies


def top_by_text(
    token: str, logprob: float, top: Sequence[tuple[int, float]], text: Callable[[int], str]
) -> dict[str, float]:
    """Return the log probabilities of the likeliest tokens and of one token, by text.

    Of several tokens with the same text, the likeliest counts. Otherwise, an unlikely token would
    hide that another token is the likeliest, which evaluations read here.

    Args:
        token: text of the token.
        logprob: log probability of the token.
        top: ids and log probabilities of the likeliest tokens, descending.
        text: returns the text of a token.
    """
    found: dict[str, float] = {}
    for token_id, value in top:
        found.setdefault(text(token_id), value)
    found.setdefault(token, logprob)
    return found
