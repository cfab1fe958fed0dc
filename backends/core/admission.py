"""Check of whether a worker can run a request. Other processes use it too, without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from draftgate.backends.adapter_card import AdapterCard
from draftgate.backends.core.grammar import Grammars
from draftgate.backends.errors import RequestRejected
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import SAMPLING_OPTIONS, GenerationRequest, GrammarSpec, Task

CHECKED_TOKENS: Final = 1 << 14
"""Number of prompt tokens to check before other threads may run."""


_TASKS: Final[Mapping[Task, tuple[str, str, str]]] = {
    Task.GENERATE: ("generate text", "a language model", "/v1/completions"),
    Task.EMBED: ("embed texts", "an embedding model", "/v1/embeddings"),
    Task.SCORE: ("rank documents", "a cross-encoder", "/v1/rerank"),
}
"""What a model with a task does, such a model, and the endpoint of the task."""


def refusal(task: Task, offered: Sequence[Task]) -> str:
    """Return the message of a request whose task is not one of those that a model offers."""
    does, model, _ = _TASKS[task]
    endpoints = " or ".join(_TASKS[each][2] for each in offered)
    return f"this model does not {does}; use {endpoints} or load {model}"


class Admission:
    """The limits of a worker. The object is thread-safe.

    Attributes:
        tokenizer: the model's tokenizer.
        max_model_len: maximum number of prompt and output tokens together.
        pool_tokens: number of tokens that the KV pool holds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        pool_tokens: int,
        grammars: Grammars | None = None,
        *,
        tasks: Sequence[Task] = (Task.GENERATE,),
        adapters: Sequence[AdapterCard] = (),
        options: Sequence[str] = SAMPLING_OPTIONS,
    ) -> None:
        """Store the limits.

        Args:
            grammars: compiles grammars, or None if the worker has no logits to mask.
            tasks: tasks that the worker offers.
            adapters: adapters that requests may select.
            options: sampling parameters that the worker applies (`Capabilities.options`).
        """
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.pool_tokens = pool_tokens
        self._grammars = grammars
        self._tasks = tasks
        self._ignored = tuple(name for name in SAMPLING_OPTIONS if name not in options)
        self._adapters = frozenset(("", *(adapter.digest for adapter in adapters)))

    def check(self, request: GenerationRequest) -> None:
        """Check that the worker can run the request. The method may be called in any thread.

        The first check of a grammar compiles it, which may take long.

        Raises:
            RequestRejected: the prompt is empty, the grammar cannot be compiled, the worker does
                not support the task or lacks the adapter, or prompt and output exceed the context
                or the KV pool.
        """
        self._check_offered(request)
        prompt, output = len(request.prompt_ids), request.sampling.max_tokens
        if not prompt:
            raise RequestRejected("the prompt has no tokens", param="prompt")
        # Clients recognise a prompt that is too long by the words "maximum context length".
        for limit, what in (
            (self.max_model_len, "this model's maximum context length is"),
            (self.pool_tokens, "the KV pool holds"),
        ):
            if prompt + output > limit:
                parts = f"{prompt} in the prompt" + (f", {output} in the output" if output else "")
                raise RequestRejected(
                    f"{what} {limit} tokens, but {prompt + output} were requested ({parts})",
                    param="prompt" if prompt >= limit else "max_tokens",
                    limit_tokens=limit,
                )
        for choice in request.resumed:
            if choice.output_ids and len(choice.output_ids) >= output:
                raise RequestRejected(
                    f"choice {choice.choice} already has {len(choice.output_ids)} tokens, "
                    f"and {output} were requested",
                    param="max_tokens",
                )
        self._check_ids("prompt", request.prompt_ids)
        for choice in request.resumed:
            self._check_ids("prompt", choice.output_ids)
            self._check_ids("prompt", choice.next_ids)
        sampling = request.sampling
        if sampling.logit_bias:
            self._check_ids("logit_bias", [token for token, _ in sampling.logit_bias])
        if sampling.stop_token_ids:
            self._check_ids("stop_token_ids", sampling.stop_token_ids)
        if sampling.allowed_token_ids:
            self._check_ids("allowed_token_ids", sampling.allowed_token_ids)
        for word in sampling.bad_words:
            self._check_ids("bad_words", word)
        if request.grammar is not None:
            self._check_grammar(request, request.grammar)

    def _check_offered(self, request: GenerationRequest) -> None:
        """Check that the worker offers the task, the adapter and the sampling parameters."""
        if request.task not in self._tasks:
            raise RequestRejected(refusal(request.task, self._tasks), param="model")
        if request.adapter not in self._adapters:
            raise RequestRejected("the worker lacks the LoRA adapter", param="model")
        for name in self._ignored:
            if getattr(request.sampling, name):
                words = f"{name} is not supported by this worker, which has an earlier version"
                raise RequestRejected(words, param=name)

    def _check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        """Check that all ids are in the vocabulary."""
        vocab = self.tokenizer.vocab_size
        for begin in range(0, len(token_ids), CHECKED_TOKENS):
            some = token_ids[begin : begin + CHECKED_TOKENS]
            if min(some) < 0 or max(some) >= vocab:
                raise RequestRejected(f"token ids must be between 0 and {vocab - 1}", param=param)

    def _check_grammar(self, request: GenerationRequest, wanted: GrammarSpec) -> None:
        if self._grammars is None:
            raise RequestRejected(
                "this worker does not support structured output", param=wanted.param
            )
        grammar = self._grammars.start(wanted)
        for choice in request.choices:
            if grammar.legal(choice.output_ids) < len(choice.output_ids):
                raise RequestRejected(
                    f"choice {choice.choice} already has tokens that the format does not allow",
                    param=wanted.param,
                )
