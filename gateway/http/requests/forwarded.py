"""What must be known of a request that goes on as it came: a few fields, found without the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from draftgate.backends.base import BYTES_PER_TOKEN
from draftgate.gateway.accounts import Account
from draftgate.gateway.errors import InvalidRequest, ModelNotFound
from draftgate.gateway.http.requests.limits import RANGES
from draftgate.policies.types import ServiceLevel, SpeculationMode

UNSAID_OUTPUT_TOKENS: Final = 1024
"""What an answer is taken to have at most where the request does not say; what answers turn out to
have is learnt as a share of it."""

MOST_OUTPUT_TOKENS: Final = 1 << 20
"""Believed where the upstream does not say how long the context of its model is: a million tokens
is the longest that open models have (2026-11-21)."""


class _Fields(msgspec.Struct):
    model: Any = None
    stream: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    priority: Any = None
    temperature: Any = None
    speculation: Any = None


_fields: Final = msgspec.json.Decoder(_Fields)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a body asks for, as far as it can be read: complaints are the upstream's.

    Attributes:
        read: whether it is a JSON object.
        model: None where the body names none.
        prompt_tokens: an estimate from the body's size.
        max_tokens: per choice.
        priority: 0 where the body names none.
        said_priority: what it says of it, whatever that is.
        temperature: 1 where the body names none.
        mode, max_draft_tokens: of `speculation`.
    """

    read: bool
    model: str | None
    stream: bool
    n: int
    prompt_tokens: int
    max_tokens: int
    priority: int
    said_priority: Any
    temperature: float = 1.0
    mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int | None = None


def wishes_of(body: bytes, max_model_len: int = 0) -> Wishes:
    """Return what a body asks for; what makes no sense counts as not said, and bounds are kept.

    Args:
        max_model_len: of the upstream's model; 0 where nobody knows.
    """
    read = True
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, RecursionError):  # no JSON, or no object
        read, fields = False, _Fields()
    return Wishes(
        read,
        fields.model if isinstance(fields.model, str) else None,
        fields.stream is True,
        _number("n", fields.n) or 1,
        -(-len(body) // BYTES_PER_TOKEN),
        min(_most_tokens(fields), max_model_len or MOST_OUTPUT_TOKENS),
        _number("priority", fields.priority) or 0,
        fields.priority,
        _temperature(fields.temperature),
        *_speculation(fields.speculation),
    )


def changes(
    wishes: Wishes, names: tuple[str | None, str], account: Account
) -> Mapping[str, str | int]:
    """Return the values of a body's fields that the upstream must get in place of the client's.

    Args:
        names: the model's, for clients (None: the upstream's own) and at the upstream.
        account: whose bounds hold.

    Raises:
        ModelNotFound: it asks for a model that is not served.
        InvalidRequest: it must be changed, and cannot be read.
    """
    found: dict[str, str | int] = {}
    ours, theirs = names
    if ours is not None:
        if wishes.model is not None and wishes.model != ours:
            raise ModelNotFound(wishes.model, ours)
        if theirs and ours != theirs:
            found["model"] = theirs
    if account.first_priority is not None:
        found |= _capped_priority(wishes, account)
    return found


def rewritten(body: bytes, changed: Mapping[str, str | int]) -> bytes:
    """Return a body with some values changed, and every other one as it came.

    Raises:
        InvalidRequest: it is no JSON object.
    """
    if not changed:
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        raise _unreadable() from None
    return msgspec.json.encode({**fields, **changed})


def _capped_priority(wishes: Wishes, account: Account) -> Mapping[str, int]:
    """Return the priority to write into the body where it asks for a better one than it may have.

    Raises:
        InvalidRequest: nobody here can tell what it asks for, but the upstream might.
    """
    said = wishes.said_priority
    if not wishes.read:
        raise _unreadable()
    if said is not None and _whole(said) is None:
        raise InvalidRequest("priority: must be a whole number", "priority")
    capped = account.capped(ServiceLevel(priority=wishes.priority)).priority
    return {} if capped == (said or 0) else {"priority": capped}


def _unreadable() -> InvalidRequest:
    return InvalidRequest("the body must be a JSON object")


def _most_tokens(fields: _Fields) -> int:
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        said = _number(name, getattr(fields, name))
        if said is not None:
            return said
    return UNSAID_OUTPUT_TOKENS


def _temperature(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1.0
    return max(float(value), 0.0)


def _speculation(value: object) -> tuple[SpeculationMode, int | None]:
    """Return the mode and the cap that `speculation` asks for."""
    said = value if isinstance(value, dict) else {}
    cap = _number("max_draft_tokens", said.get("max_draft_tokens"))
    try:
        return SpeculationMode(str(said.get("mode"))), cap
    except ValueError:
        return SpeculationMode.AUTO, cap


def _number(name: str, value: object) -> int | None:
    """Return a whole number within the bounds of its field; None for what makes no sense.

    What is below the least is nonsense in a count, what is above the most is cut.
    """
    number, bounds = _whole(value), RANGES[name]
    if number is None:
        return None
    if number < bounds.least:
        return int(bounds.least) if bounds.least < 0 else None
    return number if bounds.most is None else min(number, int(bounds.most))


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
