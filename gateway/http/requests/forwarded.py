"""The fields of a forwarded request that the gateway reads, without parsing the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from draftgate.backends.base import BYTES_PER_TOKEN
from draftgate.backends.openai.exchange import with_values
from draftgate.gateway.accounts import Account
from draftgate.gateway.errors import InvalidRequest, ModelNotFound, invalid
from draftgate.gateway.http.requests.limits import RANGES
from draftgate.policies.types import OFFLINE_PRIORITY, SpeculationMode
from draftgate.policies.values import immutable

DEFAULT_OUTPUT_TOKENS: Final = 1024
"""Maximum output tokens of a request that does not set them. The gateway learns actual lengths as a
share of this number."""

MOST_OUTPUT_TOKENS: Final = 1 << 20
"""Maximum output tokens if the upstream does not report its context length. The longest contexts of
open models have a million tokens (2026-11-21)."""


MOST_CHOICES: Final = 1024
"""Maximum choices of all prompts. The upstream reports a number that it does not accept."""


_NO_PROMPT: Final = msgspec.Raw()


class _Fields(msgspec.Struct):
    model: Any = None
    stream: Any = None
    prompt: msgspec.Raw = _NO_PROMPT
    n: Any = None
    best_of: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    priority: Any = None
    prompt_cache_key: Any = None
    temperature: Any = None
    speculation: Any = None


_MODES: Final = {mode.value: mode for mode in SpeculationMode}
_fields: Final = msgspec.json.Decoder(_Fields)


@immutable
class ForwardedFields:
    """The fields of a body.

    An invalid value counts as missing, because the upstream reports it.

    Attributes:
        is_object: whether the body is a JSON object.
        model: name of the model, empty as sent, or None if missing. An empty name is no name.
        prompts: number of prompts.
        n: number of choices that the upstream generates for each prompt.
        prompt_tokens: an estimate of the tokens of all prompts, from the size of the body.
        max_tokens: maximum output tokens per choice.
        priority: the priority, or 0 if missing.
        sent_priority: the value in the body, of any type.
        temperature: the temperature, or 1 if missing.
        mode, max_draft_tokens: the fields of `speculation`.
        cache_key: the field `prompt_cache_key`, or empty if missing.
    """

    is_object: bool
    model: str | None
    stream: bool
    prompts: int
    n: int
    prompt_tokens: int
    max_tokens: int
    priority: int
    sent_priority: Any
    temperature: float = 1.0
    mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int | None = None
    cache_key: str = ""


def read_fields(body: bytes, max_model_len: int = 0) -> ForwardedFields:
    """Return the fields of a body, within their bounds.

    Args:
        max_model_len: context length of the upstream's model in tokens, or 0 if unknown.
    """
    is_object = True
    try:
        fields = _fields.decode(body)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        is_object, fields = False, _Fields()
    # Most requests set few of the fields.
    prompts = n = 1
    if fields.prompt is not _NO_PROMPT:
        prompts = min(_num_prompts(fields.prompt), MOST_CHOICES)
    if fields.n is not None or fields.best_of is not None:
        n = max(_number("n", fields.n) or 1, _number("best_of", fields.best_of) or 1)
    mode, max_draft_tokens = SpeculationMode.AUTO, None
    if fields.speculation is not None:
        mode, max_draft_tokens = _speculation(fields.speculation)
    return ForwardedFields(
        is_object,
        fields.model if isinstance(fields.model, str) else None,
        fields.stream is True,
        prompts,
        min(n, MOST_CHOICES // prompts),
        -(-len(body) // BYTES_PER_TOKEN),
        min(_most_tokens(fields), max_model_len or MOST_OUTPUT_TOKENS),
        0 if fields.priority is None else _number("priority", fields.priority) or 0,
        fields.priority,
        1.0 if fields.temperature is None else _temperature(fields.temperature),
        mode,
        max_draft_tokens,
        fields.prompt_cache_key if isinstance(fields.prompt_cache_key, str) else "",
    )


def changed_fields(
    fields: ForwardedFields, names: tuple[Sequence[str], str], account: Account
) -> Mapping[str, str | int]:
    """Return the fields whose values for the upstream differ from the client's values.

    Args:
        names: the model's names for clients (empty for the upstream's own), and that at the
            upstream.
        account: the account whose bounds apply.

    Raises:
        ModelNotFound: the request names another model.
        InvalidRequest: a value must be changed but cannot be read.
    """
    found: dict[str, str | int] = {}
    ours, theirs = names
    if ours:
        if fields.model and fields.model not in ours:
            raise ModelNotFound(fields.model, *ours)
        if theirs and (fields.model or ours[0]) != theirs:
            found["model"] = theirs
    elif fields.model == "" and theirs:  # some servers refuse an empty name
        found["model"] = theirs
    first, default = account.first_priority, account.priority
    if first is not None and first >= OFFLINE_PRIORITY:
        first = default = 0  # only the gateway knows this class, and many servers accept none
    if fields.is_object and fields.sent_priority is None:
        if priority := default if first is None else max(default, first):
            found["priority"] = priority
    elif first is not None:
        found |= _capped_priority(fields, first)
    return found


def rewrite_body(body: bytes, changed: Mapping[str, str | int]) -> bytes:
    """Return a body with some values changed and all others as received.

    Raises:
        InvalidRequest: the body is not a JSON object.
    """
    if not changed:
        return body
    try:
        return with_values(body, changed)
    except (ValueError, RecursionError):
        raise _not_an_object() from None


def _capped_priority(fields: ForwardedFields, first: int) -> Mapping[str, int]:
    """Return the priority for the upstream if the account does not allow the client's.

    Args:
        first: the most urgent priority that the account allows.

    Raises:
        InvalidRequest: the gateway cannot read the client's priority, although the upstream might.
    """
    sent = fields.sent_priority
    if not fields.is_object:
        raise _not_an_object()
    if sent is not None and _whole(sent) is None:
        raise invalid("priority", "must be a whole number")
    capped = max(fields.priority, first)
    return {} if capped == (sent or 0) else {"priority": capped}


def _not_an_object() -> InvalidRequest:
    return InvalidRequest("the body must be a JSON object")


def _num_prompts(prompt: msgspec.Raw) -> int:
    """Return the number of prompts of a completion, each of which is a text or a list of tokens."""
    if _first_byte(prompt) != b"[":
        return 1
    prompts = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    return len(prompts) if prompts and _first_byte(prompts[0]) in {b'"', b"["} else 1


def _first_byte(value: msgspec.Raw) -> bytes:
    return memoryview(value)[:1].tobytes()


def _most_tokens(fields: _Fields) -> int:
    for name, value in (
        ("max_completion_tokens", fields.max_completion_tokens),
        ("max_output_tokens", fields.max_output_tokens),
        ("max_tokens", fields.max_tokens),
    ):
        given = None if value is None else _number(name, value)
        if given is not None and given >= 0:
            return given
    return DEFAULT_OUTPUT_TOKENS


def _temperature(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1.0
    try:
        return max(float(value), 0.0)
    except OverflowError:  # an integer beyond the range of a float
        return 1.0


def _speculation(value: object) -> tuple[SpeculationMode, int | None]:
    if not isinstance(value, dict):
        return SpeculationMode.AUTO, None
    mode = _MODES.get(str(value.get("mode")), SpeculationMode.AUTO)
    return mode, _number("max_draft_tokens", value.get("max_draft_tokens"))


def _number(name: str, value: object) -> int | None:
    """Return a whole number within the range of its field, or None if it is invalid.

    A number above the range is reduced to its maximum. A number below it is invalid unless the
    range includes negative numbers.
    """
    number, bounds = _whole(value), RANGES[name]
    if number is None:
        return None
    if number < bounds.least:
        return int(bounds.least) if bounds.least < 0 else None
    return number if bounds.most is None else min(number, int(bounds.most))


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
