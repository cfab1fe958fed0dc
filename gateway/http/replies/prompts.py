"""Prompts in responses: `echo` with `logprobs`, and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial

from msgspec import UNSET

from draftgate.backends.core.detokenize import TextStream
from draftgate.backends.prompt_logprobs import PromptLogprobs, ScoredToken
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.http.replies.logprobs import key_namer, top_by_name
from draftgate.gateway.http.replies.shapes import (
    CompletionLogprobs,
    PromptField,
    PromptTokenReply,
)
from draftgate.gateway.http.requests.validation import ParsedRequest


class PromptReplies:
    """The prompts of a request in the layout of its response."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self._parsed = parsed
        self._found: dict[int, PromptLogprobs] = {}  # by prompt

    def observe(self, choice: int, found: PromptLogprobs | None) -> None:
        """Keep the log probabilities that a choice reports, for all choices of its prompt."""
        if found is not None:
            self._found[choice // self._parsed.job.n] = found

    def echoed_logprobs(self, prompt: int) -> CompletionLogprobs:
        """Return the log probabilities of an echoed prompt, as a new object."""
        parsed, ids = self._parsed, self._parsed.job.prompts[prompt]
        name = cache(key_namer(parsed))
        tokens, alternatives = [name(token) for token in ids], parsed.job.sampling.logprobs
        logprobs: list[float | None] = [None]
        top: list[dict[str, float] | None] = [None]
        for token, scored in zip(ids[1:], self._scored(prompt), strict=True):
            logprobs.append(scored.logprob)
            top.append(top_by_name(token, scored.logprob, scored.top[:alternatives], name))
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


class TextOffsets:
    """The positions at which the tokens of an output begin, in characters of the response's text.

    Tokens of the same character begin at its position, and so do tokens without text.
    """

    def __init__(self, parsed: ParsedRequest, prompt: int, begin: int) -> None:
        """Start before the first token.

        Args:
            prompt: index of the prompt.
            begin: number of characters before the output.
        """
        tokenizer, job = parsed.served.tokenizer, parsed.job
        skips = job.sampling.skip_special_tokens
        texts = tokenizer.texts if skips else tokenizer.texts_with_special
        # The worker converts tokens to text in the same way.
        self._stream = TextStream(
            partial(tokenizer.decode, skip_special_tokens=skips),
            context=job.prompts[prompt],
            alone=texts.__getitem__,
        )
        self._end = begin

    def add(self, token_id: int) -> int:
        """Add a token of the output, and return its position."""
        begin = self._end
        self._end += len(self._stream.add(token_id))
        return begin


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
