"""Log probabilities of output tokens, in the layout of chats and of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Sequence

from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import TokenLogprob
from draftgate.gateway.http.replies.shapes import TokenLogprobReply, TopLogprob


def token_logprobs(
    entries: Sequence[TokenLogprob], tokenizer: Tokenizer, unknown: list[int] | None = None
) -> list[TokenLogprobReply]:
    """Return the log probabilities of tokens with their texts.

    Args:
        entries: the tokens, with the most likely alternatives.
        tokenizer: the tokenizer of the model.
        unknown: the bytes of a token with part of a character, which has no text.
    """

    def spelled(token_id: int, logprob: float) -> TopLogprob:
        token = tokenizer.token_text(token_id)
        return TopLogprob(token, logprob, unknown if "\ufffd" in token else list(token.encode()))

    replies = []
    for entry in entries:
        chosen = spelled(entry.token_id, entry.logprob)
        top = [spelled(token_id, logprob) for token_id, logprob in entry.top]
        replies.append(TokenLogprobReply(chosen.token, chosen.logprob, chosen.bytes, top))
    return replies
