"""shared_prefix: many short questions behind few long system prompts."""

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
"""Zipf exponent over the prefixes: the classic law. There the most popular of 64 has 21% of the
requests; SGLang's default is uniform."""


class SharedPrefix:
    """Sessions that share a system message to the character and differ from the user's first word.

    `session` names the prefix. Where the context is short, the prefix gives way first.
    """

    name = "shared_prefix"

    def __init__(self, setting: WorkloadSettings) -> None:
        self._setting = setting
        self._popularity = zipf(PREFIXES, POPULARITY)
        self._prefix = lru_cache(maxsize=PREFIXES)(self._written)
        self._answer_tokens = setting.answer_tokens(ANSWER_TOKENS)
        whole = setting.prompt_tokens(
            PREFIX_TOKENS + QUESTION_TOKENS,
            self._answer_tokens,
            beside=setting.counter.count(HEADING),
        )
        self._question_tokens = max(min(QUESTION_TOKENS, whole // 2), 1)
        self._prefix_tokens = max(whole - self._question_tokens, 1)

    def request(self, index: int) -> RequestSpec:
        setting = self._setting
        rng = setting.rng(self.name, index)
        prefix = self._popularity.draw(rng)
        asked = setting.text(setting.corpus.prose, rng, self._question_tokens)
        return RequestSpec(
            prompt=None,
            messages=(
                ChatMessage("system", self._prefix(prefix)),
                ChatMessage("user", f"{index}. {asked}"),
            ),
            max_tokens=self._answer_tokens,
            seed=setting.seed + index,
            class_name=self.name,
            session=f"prefix-{prefix}",
            slo=setting.slo,
        )

    def _written(self, prefix: int) -> str:
        setting = self._setting
        rng = setting.rng(self.name, "prefix", prefix)
        text = setting.text(setting.corpus.prose, rng, self._prefix_tokens)
        return f"{prefix}. {HEADING}{text}"
