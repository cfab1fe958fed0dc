"""What a generator's processes tell each other: MessagePack over a socket, behind its length.

parent ── SenderJob, SenderStart ──> sender    the end of the stream means: stop
parent <──── SenderReport ──── sender          first: the plan is made; last: the end
"""

from __future__ import annotations

import asyncio
from struct import Struct as Layout
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from draftgate.loadgen.events import End
from draftgate.loadgen.planning.plan import WHOLE, Load, Part
from draftgate.loadgen.sending.client import ClientTimeouts
from draftgate.loadgen.types import SINGLE, Record
from draftgate.loadgen.workloads import ApproximateCounter

T = TypeVar("T")


class SenderJob(Struct, frozen=True):
    """What a process needs in order to send its part of a load.

    Attributes:
        counter, max_model_len: what the server told: with them all parts are of the same plan.
    """

    load: Load
    url: str
    model: str
    api_key: str = ""
    patience: ClientTimeouts = ClientTimeouts()
    counter: ApproximateCounter = ApproximateCounter()
    max_model_len: int | None = None
    part: Part = WHOLE


class SenderStart(Struct):
    """When to begin: seconds of the monotonic clock, which all processes share."""

    at_s: float


class SenderReport(Struct, omit_defaults=True):
    """What happened since the last report.

    Attributes:
        started: how many requests were started.
        records: of those that ended, with their texts.
        end: when the part is over; nothing comes after it.
    """

    started: int = 0
    records: list[Record] = []
    end: End | None = None


JOB: Final = Decoder(SenderJob, dec_hook=lambda kind, value: kind(value))
START: Final = Decoder(SenderStart)
REPORT: Final = Decoder(SenderReport, dec_hook=lambda _kind, _value: SINGLE)  # records keep no flow

_encoder: Final = Encoder(enc_hook=str)  # of paths, and of flows, which nobody reads
_LENGTH: Final = Layout(">I")


def frame(message: SenderJob | SenderStart | SenderReport) -> bytes:
    """Return a message as it is written."""
    content = _encoder.encode(message)
    return _LENGTH.pack(len(content)) + content


async def receive(reader: asyncio.StreamReader, decoder: Decoder[T]) -> T:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the other side is gone.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return decoder.decode(await reader.readexactly(length))
