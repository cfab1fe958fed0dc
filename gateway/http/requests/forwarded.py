"""What must be known of a request that goes on as it came: a few fields, found without the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.errors import InvalidRequest, ModelNotFound

BYTES_PER_TOKEN: Final = 4
"""Of English text in JSON, roughly. Only estimates rest on it."""


class _Fields(msgspec.Struct):
    model: Any = None
    stream: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    priority: Any = None


_fields: Final = msgspec.json.Decoder(_Fields)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a body asks for, as far as it can be read: complaints are the upstream's.

    Attributes:
        model: None where the body names none.
        prompt_tokens: an estimate from the body's size.
        max_tokens: per choice; None is all that fits.
    """

    model: str | None
    stream: bool
    n: int
    prompt_tokens: int
    max_tokens: int | None
    priority: int


def wishes_of(body: bytes) -> Wishes:
    """Return what a body asks for; what it does not say rightly counts as not said."""
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, RecursionError):  # no JSON, or no object
        fields = _Fields()
    most = _whole(fields.max_completion_tokens)
    return Wishes(
        fields.model if isinstance(fields.model, str) else None,
        fields.stream is True,
        max(1, _whole(fields.n) or 1),
        estimated_tokens(body),
        _whole(fields.max_tokens) if most is None else most,
        _whole(fields.priority) or 0,
    )


def estimated_tokens(body: bytes) -> int:
    """Return how many tokens a body's prompt may have, by its size."""
    return -(-len(body) // BYTES_PER_TOKEN)


def renamed(body: bytes, wishes: Wishes, ours: str, theirs: str) -> bytes:
    """Return the body with the upstream's name of the model, and every other value as it came.

    Raises:
        ModelNotFound: it asks for a model that is not `ours`.
        InvalidRequest: it is no JSON object.
    """
    if wishes.model is not None and wishes.model != ours:
        raise ModelNotFound(wishes.model, ours)
    if ours == theirs or not theirs:
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest("the body must be a JSON object") from None
    return msgspec.json.encode({**fields, "model": theirs})


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
