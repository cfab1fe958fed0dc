"""The bounds of request parameters and of the work of a request, for validation and OpenAPI.

The module `schemas` declares types, and `validation` checks relations between fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from draftgate.backends.token_ids import TokenIds
from draftgate.gateway.errors import invalid

MAX_STOP_CHARACTERS: Final = 16 << 10
"""Maximum characters of all stop texts of a request. Each text counts for at least
`LEAST_STOP_CHARACTERS`, because the worker searches for each text after each token."""

LEAST_STOP_CHARACTERS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
MAX_BIASED_TOKENS: Final = 1024
MAX_STOP_TOKENS: Final = 1024
MAX_BAD_WORDS: Final = 1024
MAX_BAD_WORD_CHARACTERS: Final = 256

MAX_PENALTY: Final = 2.0
"""OpenAI's bound of frequency and presence penalties."""

MAX_PRIORITY: Final = 1 << 31
"""A bound that fits every wire format. No client needs more classes."""

MAX_GUIDED_CHOICES: Final = 1000

MAX_EMBEDDED_TEXTS: Final = 2048
"""OpenAI's bound."""

MAX_RERANKED_DOCUMENTS: Final = 1000
"""The largest number that Cohere recommends for a request."""

MAX_RERANKED_TOKENS: Final = 1 << 19
"""Maximum tokens of all pairs of a request, each of which repeats the query. They are those of 1024
pairs at the usual maximum of 512 tokens."""

RANDOM_SEED: Final = -1
"""The seed that requests a random seed, as in vLLM and llama.cpp."""

NO_LIMIT: Final = -1
"""The `max_tokens` that generates until the context is full, as in llama.cpp."""

FIT_CONTEXT: Final = -1
"""The `truncate_prompt_tokens` that keeps as many tokens as fit the context, as in vLLM."""

MAX_TOOLS: Final = 128
FUNCTION_NAME: Final = r"^[a-zA-Z0-9_-]{1,128}$"
"""Anthropic's rule for names of tools. OpenAI's names have at most 64 characters. Such a name needs
no quoting in any dialect."""

MAX_METADATA: Final = 16
MAX_METADATA_KEY: Final = 64
MAX_METADATA_VALUE: Final = 512
"""OpenAI's bounds."""


class Range(NamedTuple):
    """The range of a number, with both ends."""

    least: float
    most: float | None = None

    def keywords(self) -> dict[str, float]:
        """Return the range as keywords of JSON schemas."""
        words = {"minimum": self.least}
        return words if self.most is None else {**words, "maximum": self.most}

    def check(self, name: str, value: float | None) -> None:
        """Raise `InvalidRequest` for a value outside the range.

        Args:
            name: name of the parameter.
            value: the value, or None, which is always valid.
        """
        if value is None:
            return
        if not (self.least <= value < math.inf and (self.most is None or value <= self.most)):
            raise invalid(name, f"must be {self._words()}, not {value}")

    def _words(self) -> str:
        if self.most is None:
            return f"at least {_plain(self.least)}"
        return f"between {_plain(self.least)} and {_plain(self.most)}"


RANGES: Final[Mapping[str, Range]] = {
    "best_of": Range(0),
    "frequency_penalty": Range(-MAX_PENALTY, MAX_PENALTY),
    "logprobs": Range(0, MAX_TOP_LOGPROBS),
    "max_completion_tokens": Range(1),
    "max_draft_tokens": Range(0),
    "max_output_tokens": Range(1),
    "max_tokens": Range(NO_LIMIT),
    "max_tokens_per_doc": Range(0),
    "max_tool_calls": Range(1),
    "min_p": Range(0.0, 1.0),
    "min_tokens": Range(0),
    "n": Range(1),
    "presence_penalty": Range(-MAX_PENALTY, MAX_PENALTY),
    "priority": Range(-MAX_PRIORITY, MAX_PRIORITY),
    "prompt_logprobs": Range(0, MAX_TOP_LOGPROBS),
    # Wider than any model needs, and far from an overflow of float32 logits.
    "repetition_penalty": Range(0.01, 100.0),
    "seed": Range(-1 << 63, (1 << 64) - 1),
    "temperature": Range(0.0),
    "top_k": Range(-1),
    "top_logprobs": Range(0, MAX_TOP_LOGPROBS),
    "top_n": Range(0),
    "top_p": Range(0.0, 1.0),
    "truncate_prompt_tokens": Range(FIT_CONTEXT),
}
"""The range of each numeric field, by its name in every body."""

BIAS: Final = Range(-100.0, 100.0)
"""OpenAI's bound, which is enough to force or ban a token."""


def check_ranges(wire: msgspec.Struct, within: str = "") -> None:
    """Raise `InvalidRequest` for the first number of a struct that is outside its range.

    Args:
        wire: the decoded struct.
        within: path of the struct in the body, with a trailing dot.
    """
    names, read = _bounded_fields(type(wire))
    for name, value in zip(names, read(wire), strict=False):
        if value is not None and type(value) in _NUMBERS:
            RANGES[name].check(within + name, value)


_NUMBERS: Final = frozenset({int, float})


@cache
def _bounded_fields(
    kind: type[msgspec.Struct],
) -> tuple[list[str], Callable[[msgspec.Struct], tuple[Any, ...]]]:
    """Return the names of the bounded fields, and a function that reads all of them at once."""
    names = [name for name in kind.__struct_fields__ if name in RANGES]
    # With two more names, it returns a tuple for any number of fields.
    return names, attrgetter(*names, "__class__", "__doc__")


_STOP: Final = {"maxLength": MAX_STOP_CHARACTERS}
_STOPS: Final = {"items": {"type": "string", **_STOP}}
_FUNCTION_NAME: Final = {"string": {"pattern": FUNCTION_NAME}}
_OF_OBJECTS: Final = {"object": {"properties": {"type": {"const": "object"}}}}

_CHOICES: Final = {
    "array": {
        "minItems": 1,
        "maxItems": MAX_GUIDED_CHOICES,
        "items": {"type": "string", "minLength": 1},
    }
}

_SCHEMA_TEXT: Final = {"string": {"pattern": r"^\s*\{"}}

KEYWORDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "stop": {"string": _STOP, "array": _STOPS},
    "stop_sequences": {"array": _STOPS},
    "logit_bias": {
        "object": {
            "maxProperties": MAX_BIASED_TOKENS,
            "propertyNames": {"pattern": r"^(0|[1-9]\d*)$"},
            "additionalProperties": {"type": "number", **BIAS.keywords()},
        }
    },
    "stop_token_ids": {"array": {"maxItems": MAX_STOP_TOKENS}},
    "allowed_token_ids": {"array": {"minItems": 1}},
    "bad_words": {
        "array": {
            "maxItems": MAX_BAD_WORDS,
            "items": {"type": "string", "maxLength": MAX_BAD_WORD_CHARACTERS},
        }
    },
    "truncate_prompt_tokens": {"integer": {"not": {"const": 0}}},
    "dimensions": {"integer": {"minimum": 1}},
    "RerankBody.query": {"string": {"minLength": 1}},
    "RerankBody.documents": {"array": {"minItems": 1, "maxItems": MAX_RERANKED_DOCUMENTS}},
    "guided_choice": _CHOICES,
    "StructuredOutputs.choice": _CHOICES,
    "guided_json": _SCHEMA_TEXT,
    "StructuredOutputs.json": _SCHEMA_TEXT,
    "messages": {"array": {"minItems": 1}},
    # Reasoning alone is not part of a prompt.
    "ResponsesBody.input": {
        "array": {
            "minItems": 1,
            "contains": {
                "not": {"properties": {"type": {"const": "reasoning"}}, "required": ["type"]}
            },
        },
        "string": {"minLength": 1},
    },
    "tools": {"array": {"maxItems": MAX_TOOLS}},
    "Function.name": _FUNCTION_NAME,
    "FlatTool.name": _FUNCTION_NAME,
    "CustomTool.name": _FUNCTION_NAME,
    "parameters": _OF_OBJECTS,
    "input_schema": _OF_OBJECTS,
    "metadata": {
        "object": {
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_METADATA_KEY},
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
        }
    },
}
"""Keywords of JSON schemas, by field (or struct and field) and by JSON type of the value."""

REQUIRED: Final = frozenset(
    {
        "ChatBody.messages",
        "CompletionBody.prompt",
        "CountTokensBody.messages",
        "EmbeddingBody.input",
        "MessagesBody.max_tokens",
        "MessagesBody.messages",
        "ResponsesBody.input",
    }
)
"""Required fields that decoding treats as optional, so that validation can name a missing field."""


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


LEAST_TOKENS: Final = 1024
"""The tokens for which each choice counts at least, because a choice without tokens still costs
some kilobytes of memory and time of the event loop."""


def check_choices(prompts: int, n: int, bound: int, name: str = "n") -> None:
    """Check the number of choices, which needs no tokenised prompts.

    Args:
        prompts: number of prompts.
        n: number of choices of each prompt.
        bound: maximum work of the request, in tokens.
        name: name of the parameter that sets the number of choices.

    Raises:
        InvalidRequest: there are too many choices.
    """
    most = max(bound // LEAST_TOKENS, 1)
    if prompts * n > most:
        what = f"{prompts} prompts with {n} choices each are more than {most} choices"
        raise invalid(
            name if n > 1 else "prompt",
            f"{what} (--max-request-tokens, where each choice counts for {LEAST_TOKENS} tokens or "
            "more); send several requests",
        )


def most_output_tokens(
    prompts: Sequence[TokenIds],
    n: int,
    max_tokens: int | None,
    alternatives: tuple[int | None, int | None],
    bound: int,
) -> int | None:
    """Return the output limit of each choice that the work of a request allows.

    The tokens of prompts and outputs count, and so does each alternative of their log
    probabilities. A request of one choice may always fill the context.

    Args:
        n: number of choices of each prompt.
        max_tokens: the requested output limit, or None to fill the context.
        alternatives: number of alternatives of each token of the prompt and of the output, or None.
        bound: maximum work of the request, in tokens.

    Returns:
        None if only the context limits the output.

    Raises:
        InvalidRequest: the request asks for too much work.
    """
    choices = len(prompts) * n
    if choices == 1:
        return max_tokens
    of_prompt, of_output = (1 + (number or 0) for number in alternatives)
    of_prompts = of_prompt * sum(map(len, prompts))
    left = (bound - of_prompts) // choices // of_output
    if left < max(max_tokens or 0, 1):
        work = of_prompts + choices * of_output * (max_tokens or 1)
        raise invalid(
            "max_tokens" if max_tokens else "prompt",
            f"{choices} choices with their prompts and log probabilities have up to {work} tokens, "
            f"but a request may have {bound} (--max-request-tokens); send several requests",
        )
    return left if max_tokens is None else max_tokens
