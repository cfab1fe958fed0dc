"""Workload `shared_prefix`: many short questions after a few long system prompts."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from draftgate.loadgen.types import ChatMessage, RequestSpec
from draftgate.loadgen.workloads.base import WorkloadSettings, zipf

PREFIXES: Final = 64
PREFIX_TOKENS: Final = 2048
QUESTION_TOKENS: Final = 128
ANSWER_TOKENS: Final = 256
"""The defaults of SGLang's `bench_serving --dataset-name generated-shared-prefix`."""

HEADING: Final = "You know the following by heart, and answer from it.\n\n"

POPULARITY: Final = 1.0
"""Zipf exponent over the prefixes. The most popular of 64 prefixes then has 21% of the requests.
SGLang's default is uniform."""


class SharedPrefix:
    """Sessions with one system message each, whose requests differ from the user's first word.

    `session` names the prefix. If the context is short, the prefix is shortened first.
    """

    name = "shared_prefix"

    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings
        self._popularity = zipf(PREFIXES, POPULARITY)
        self._prefix = lru_cache(maxsize=PREFIXES)(self._write_prefix)
        self._answer_tokens = settings.answer_tokens(ANSWER_TOKENS)
        whole = settings.prompt_tokens(
            PREFIX_TOKENS + QUESTION_TOKENS,
            self._answer_tokens,
            beside=settings.counter.count(HEADING),
        )
        self._question_tokens = max(min(QUESTION_TOKENS, whole // 2), 1)
        self._prefix_tokens = max(whole - self._question_tokens, 1)

    def request(self, index: int) -> RequestSpec:
        settings = self._settings
        rng = settings.rng(self.name, index)
        prefix = self._popularity.draw(rng)
        question = settings.text(settings.corpus.prose, rng, self._question_tokens)
        messages = (
            ChatMessage("system", self._prefix(prefix)),
            ChatMessage("user", f"{index}. {question}"),
        )
        session = f"prefix-{prefix}"
        return settings.spec(self.name, index, self._answer_tokens, messages, session=session)

    def _write_prefix(self, prefix: int) -> str:
        settings = self._settings
        rng = settings.rng(self.name, "prefix", prefix)
        text = settings.text(settings.corpus.prose, rng, self._prefix_tokens)
        return f"{prefix}. {HEADING}{text}"
