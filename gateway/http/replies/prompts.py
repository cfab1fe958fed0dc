"""Prompts in responses: `echo` with `logprobs`, and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial

from msgspec import UNSET

from draftgate.backends.core.detokenize import TextStream
from draftgate.backends.prompt_logprobs import PromptLogprobs, ScoredToken
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.http.replies.logprobs import token_namer, top_by_text
from draftgate.gateway.http.replies.shapes import (
    CompletionLogprobs,
    PromptField,
    PromptTokenReply,
)
from draftgate.gateway.http.requests.validation import ParsedRequest


class PromptReplies:
    """The prompts of a request in the layout of its response."""

    def __init__(self, parsed: ParsedRequest) -> None:
        """Start without log probabilities."""
        self._parsed = parsed
        self._found: dict[int, PromptLogprobs] = {}  # by prompt

    def observe(self, choice: int, found: PromptLogprobs | None) -> None:
        """Keep the log probabilities that a choice reports, for all choices of its prompt."""
        if found is not None:
            self._found[choice // self._parsed.job.n] = found

    def echoed_logprobs(self, prompt: int) -> CompletionLogprobs:
        """Return the log probabilities of an echoed prompt, as a new object."""
        parsed, ids = self._parsed, self._parsed.job.prompts[prompt]
        text = cache(token_namer(parsed))
        tokens, alternatives = [text(token) for token in ids], parsed.job.sampling.logprobs
        logprobs: list[float | None] = [None]
        top: list[dict[str, float] | None] = [None]
        for token, scored in zip(tokens[1:], self._scored(prompt), strict=True):
            logprobs.append(scored.logprob)
            top.append(top_by_text(token, scored.logprob, scored.top[:alternatives], text))
        offsets = prompt_offsets(ids, parsed.echoed[prompt], parsed.served.tokenizer)
        return CompletionLogprobs(tokens, logprobs, top, offsets)

    def field(self, prompt: int) -> PromptField:
        """Return the field `prompt_logprobs` of a prompt, or unset without it."""
        parsed, alternatives = self._parsed, self._parsed.prompt_logprobs
        if alternatives is None:
            return UNSET
        text = cache(parsed.served.tokenizer.token_text)
        shown: list[dict[int, PromptTokenReply] | None] = [None]
        ids = parsed.job.prompts[prompt]
        for token, (logprob, rank, top) in zip(ids[1:], self._scored(prompt), strict=True):
            # The token of the prompt comes first, as in vLLM.
            entry = {token: PromptTokenReply(logprob, rank, text(token))}
            for place, (other, value) in enumerate(top[:alternatives], 1):
                entry.setdefault(other, PromptTokenReply(value, place, text(other)))
            shown.append(entry)
        return shown

    def _scored(self, prompt: int) -> Iterator[ScoredToken]:
        found = self._found.get(prompt)  # a prompt of one token has none
        return iter(()) if found is None else found.scored_tokens()


def prompt_offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the position at which each token of a prompt begins, in characters of its text.

    Tokens of the same character begin at its position. Special tokens that the tokenizer adds to a
    text have no width.

    Args:
        token_ids: tokens of the prompt.
        text: text of the prompt, as echoed.
        tokenizer: tokenizer of the model.
    """
    stream = TextStream(
        partial(tokenizer.decode, skip_special_tokens=False),
        # The texts of special tokens are empty there.
        alone=lambda token: tokenizer.texts[token] or None,
    )
    begins, end = [], 0
    for token in token_ids:
        begins.append(end)
        end += len(stream.add(token))
    added = max(end + len(stream.flush()) - len(text), 0)
    return [max(begin - added, 0) for begin in begins]
