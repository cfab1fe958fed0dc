"""The heads of the responses of upstreams, of which most are equal."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from multidict import CIMultiDict, CIMultiDictProxy

MOST_HEADS: Final = 256
"""Number of known heads. Heads with a date are new every second."""

Fields: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""The names and the values of headers."""

_OF_GATEWAY: Final = frozenset({
    # of the connection (RFC 9110, section 7.6.1), or set by the gateway itself
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"content-length", b"date", b"server",
    # the body is decoded
    b"content-encoding",
    b"set-cookie",
})  # fmt: skip
"""Headers that no client of the gateway gets."""


@lru_cache(maxsize=256)
def _name(name: bytes) -> tuple[bytes, str | None]:
    """Return the name of a header in lower case, and the name for clients, or None."""
    lower = name.lower()
    # The gateway itself decides which pages may read its responses.
    is_passed = lower not in _OF_GATEWAY and not lower.startswith(b"access-control-")
    return lower, name.decode("latin-1") if is_passed else None


class Head(NamedTuple):
    """The head of a response, which responses with equal fields share.

    Attributes:
        headers: the headers for a client of the gateway, without regard to upper and lower case.
        content_type: the type of the body in lower case, without parameters.
        length: the length of the body, or None if the head does not contain it.
        ends_with_connection: whether only the end of the connection ends the body.
        coding: the coding of the body.
    """

    headers: CIMultiDictProxy[str]
    content_type: str
    length: int | None
    ends_with_connection: bool
    coding: bytes


@lru_cache(maxsize=MOST_HEADS)
def read_head(fields: Fields) -> Head:
    """Return the head with some fields."""
    passed, content_type, length, coding = [], "", None, b"identity"
    ends_with_connection = True
    for name, value in fields:
        lower, passed_name = _name(name)
        if passed_name is not None:
            text = value.decode("utf-8", "surrogateescape")
            passed.append((passed_name, text))
            if lower == b"content-type":
                content_type = text.partition(";")[0].strip().lower()
        elif lower == b"content-length":
            length, ends_with_connection = int(value), False
        elif lower == b"transfer-encoding":
            ends_with_connection = False
        elif lower == b"content-encoding":
            coding = value.strip().lower()
    headers = CIMultiDictProxy(CIMultiDict(passed))
    return Head(headers, content_type, length, ends_with_connection, coding)
