"""Was an answer of embeddings whole? Sans-I/O.

Every input has exactly one vector, all of one length and finite, and the usage counts tokens.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from dataclasses import dataclass
from typing import Any, Final

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from draftgate.loadgen.checking.audit import Verdict

NUMBER_BYTES: Final = 4


class _Vector(Struct):
    index: int
    embedding: str | list[float]


class _Reply(Struct):
    data: list[_Vector] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


_decoder: Final = Decoder(_Reply)


@dataclass(slots=True)
class VectorAudit:
    """Judges one answer of `/v1/embeddings`.

    Attributes:
        inputs: how many texts were sent.
        verdict: the first fault so far.
        detail: the fault in words.
        vectors: little-endian float32, by input; empty unless the answer was whole.
        usage: what the server reported, if it did.
    """

    inputs: int
    verdict: Verdict = Verdict.OK
    detail: str = ""
    vectors: tuple[bytes, ...] = ()
    usage: dict[str, Any] | None = None

    def add(self, body: bytes) -> None:
        """Take the whole answer."""
        try:
            reply = _decoder.decode(body)
            if reply.error is not None or reply.data is None:
                raise ValueError(f"no data but {body[:80]!r}")
            places = [told.index for told in reply.data]
            if len(set(places)) < len(places):
                self.fault(Verdict.DUPLICATED, f"vectors came twice: {sorted(places)}")
            elif sorted(places) != list(range(self.inputs)):
                self.fault(Verdict.MALFORMED, f"{self.inputs} inputs, vectors {sorted(places)}")
            else:
                in_order = sorted(reply.data, key=lambda told: told.index)
                self.vectors = _checked([_packed(told.embedding) for told in in_order])
        except (DecodeError, UnicodeDecodeError, ValueError, OverflowError) as error:
            self.fault(Verdict.MALFORMED, str(error))
        else:
            self._count(reply.usage)

    def fault(self, verdict: Verdict, detail: str) -> None:
        """Record a fault; the first one stands."""
        if self.verdict is Verdict.OK:
            self.verdict, self.detail, self.vectors = verdict, detail, ()

    def _count(self, usage: dict[str, Any] | None) -> None:
        self.usage = usage
        if usage is None:
            self.fault(Verdict.NO_USAGE, "the answer has no usage")
            return
        tokens = usage.get("prompt_tokens")
        if not isinstance(tokens, int) or tokens < self.inputs:
            self.fault(Verdict.BAD_USAGE, f"{self.inputs} inputs, but the usage is {usage}")


def _packed(embedding: str | list[float]) -> bytes:
    """Return a vector's bytes. Servers that know no base64 send numbers."""
    if isinstance(embedding, list):
        return struct.pack(f"<{len(embedding)}f", *embedding)
    try:
        return base64.b64decode(embedding, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None


def _checked(vectors: list[bytes]) -> tuple[bytes, ...]:
    """Return the vectors.

    Raises:
        ValueError: one is empty, of another length than the first, or not finite.
    """
    sizes = {len(vector) for vector in vectors}
    if len(sizes) > 1 or 0 in sizes or any(size % NUMBER_BYTES for size in sizes):
        raise ValueError(f"vectors of {sorted(sizes)} bytes")
    for vector in vectors:
        numbers = struct.unpack(f"<{len(vector) // NUMBER_BYTES}f", vector)
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a vector is not finite")
    return tuple(vectors)
