"""The sampling parameters of a request."""

from __future__ import annotations

from typing import Final

from draftgate.policies.values import immutable

SAMPLING_OPTIONS: Final = ("allowed_token_ids", "include_stop_str_in_output")
"""Parameters of `SamplingParams` that workers of earlier versions ignore."""


@immutable
class SamplingParams:
    """The sampling parameters of a request.

    Attributes:
        max_tokens: maximum number of tokens to generate, or 0 to compute only the prompt. It is 0
            for a task that generates nothing.
        seed: 64-bit key of the sampling noise.
        temperature: sampling temperature, where 0 is greedy.
        top_k: keep the k likeliest tokens, or all tokens with 0.
        top_p: keep the smallest set of tokens with this total probability, or all tokens with 1.
        min_p: keep tokens with at least this share of the highest probability, or all tokens with
            0.
        logit_bias: pairs (token id, addend of its logit), by ascending id.
        repetition_penalty: divisor of positive logits of tokens in prompt or output, and factor of
            negative logits, where 1 has no effect (CTRL, arXiv 1909.05858).
        frequency_penalty: subtracted from a token's logit for each occurrence in the output.
        presence_penalty: subtracted from a token's logit once it occurs in the output.
        min_tokens: number of tokens before an end-of-sequence token, a stop token or a stop text
            may end a choice. Without a grammar, such tokens are not sampled before.
        stop: texts that end a choice, without being part of the output.
        stop_token_ids: tokens that end a choice, without being part of its text.
        bad_words: token sequences whose last token is never sampled after the others, within the
            output. A grammar that allows only such tokens takes precedence.
        skip_special_tokens: whether special tokens are left out of the text.
        include_stop_str_in_output: whether the stop text or the stop token that ends a choice is
            part of its text.
        allowed_token_ids: the only tokens to sample, ascending, or empty for all tokens. Requests
            with a grammar have none.
        ignore_eos: whether to continue after an end-of-sequence token.
        logprobs: number of alternatives to report for each token, or None to report no log
            probabilities.
        prompt_logprobs: number of alternatives to report for each token of the prompt but the
            first, or None to report no log probabilities of the prompt. Choice 0 reports them.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty makes sampling depend on the counts of earlier tokens."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @property
    def reads_output(self) -> bool:
        """Whether sampling depends on the output's earlier tokens."""
        return self.counts_tokens or bool(self.bad_words)

    @property
    def changes_logits(self) -> bool:
        """Whether a parameter changes logits before temperature and filters."""
        static = self.logit_bias or self.allowed_token_ids or self.min_tokens > 0
        return bool(static) or self.reads_output

    @property
    def leaves_logits(self) -> bool:
        """Whether no parameter reads or changes logits before temperature and filters."""
        return self.logprobs is None and not self.changes_logits
