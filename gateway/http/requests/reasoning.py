"""Models that mark their reasoning: switches for it, and whether a response begins with it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

from draftgate.backends.token_ids import TokenIds
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.errors import Unsupported
from draftgate.gateway.http.requests.decoding import values_of
from draftgate.gateway.http.requests.schemas import ChatBody, ThinkingOptions

OPENED: Final = "<think>"
CLOSED: Final = "</think>"
"""The markers of Qwen3, QwQ and DeepSeek-R1. All are ordinary text for the tokenizer."""

SWITCHES: Final = ("enable_thinking", "thinking")
"""Template variables that switch reasoning: of Qwen3 and GLM-4.5, and of DeepSeek-V3.1."""

_FIELDS: Final = ("reasoning_effort", "enable_thinking", "thinking", "chat_template_kwargs")

_END_TOKENS: Final = 16
"""Number of tokens at the end of a prompt in which a marker is sought. A marker that is not one
token has three or four, and white space may follow it."""


class Reasoning(Enum):
    """The reasoning in the response to a prompt."""

    POSSIBLE = "the response has reasoning if it begins with the marker"
    BEGUN = "the prompt ends with the marker, so the response begins inside the reasoning"


def marks_reasoning(tokenizer: Tokenizer) -> bool:
    """Return whether the model marks its reasoning, according to its chat template."""
    return CLOSED in (tokenizer.tool_template or "")


def reasoning_of(
    prompt: TokenIds, tokenizer: Tokenizer, continued: str | None = None
) -> Reasoning | None:
    """Return the reasoning that the response to a chat's prompt may have, or None.

    Args:
        continued: the text of the assistant that the response continues, or None without one.
    """
    if not marks_reasoning(tokenizer):
        return None
    if continued:
        is_inside = continued.rfind(OPENED) > continued.rfind(CLOSED)
        return Reasoning.BEGUN if is_inside else None
    end = tokenizer.decode(prompt[-_END_TOKENS:], skip_special_tokens=False).rstrip()
    if end.endswith(CLOSED):
        return None
    return Reasoning.BEGUN if end.endswith(OPENED) else Reasoning.POSSIBLE


def template_variables(wire: ChatBody, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the variables that a request sets for the chat template.

    Fields for reasoning set the template's switch, whatever its name. Without a switch, they must
    agree with what the model does anyway.

    Raises:
        Unsupported: the template does not use a variable, or reasoning cannot be switched.
    """
    if values_of(wire, _FIELDS).count(None) == len(_FIELDS):
        return {}  # the usual case
    known = tokenizer.template_variables
    switches, marks = known.intersection(SWITCHES), marks_reasoning(tokenizer)
    found: dict[str, Any] = {}
    if wire.reasoning_effort is not None and "reasoning_effort" in known:
        found["reasoning_effort"] = wire.reasoning_effort
    if wire.reasoning_effort == "none":
        found |= dict.fromkeys(switches, False)
    for param, wanted in _switched(wire):
        if not switches and wanted != marks:
            raise Unsupported(param, " by this model's chat template")
        found |= dict.fromkeys(switches, wanted)
    for name, value in (wire.chat_template_kwargs or {}).items():
        if name in known:
            found[name] = value
        elif name not in SWITCHES:
            raise Unsupported(f"chat_template_kwargs.{name}", " by this model's chat template")
    return found


def _switched(wire: ChatBody) -> Iterator[tuple[str, bool]]:
    """Yield each field that switches reasoning, and whether it wants reasoning."""
    if wire.enable_thinking is not None:
        yield "enable_thinking", wire.enable_thinking
    if isinstance(wire.thinking, ThinkingOptions):
        yield "thinking", wire.thinking.type == "enabled"
    elif wire.thinking is not None:
        yield "thinking", wire.thinking
    for name in SWITCHES:
        value = (wire.chat_template_kwargs or {}).get(name)
        if value is not None:
            yield f"chat_template_kwargs.{name}", bool(value)
