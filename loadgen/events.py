"""Stores the events of a run as JSON lines, from which every report can be rebuilt.

    {"format": "loadgen-events/1", "settings": {...}}
    {"record": {"index": 0, "class": "code", ..., "chunks": [[at_s, tokens, characters], ...]}}
    {"end": {"duration_s": ..., "health": {...}, ...}}
    {"lossless": {...}}

The writer adds a line when a request ends, so a run that crashes leaves all completed requests. The
file of such a run has no end line, and its last line may be incomplete. Times are seconds from the
start of the run. The file holds only lengths and SHA-256 digests of prompts and responses. It is
small, holds no user text, and still shows whether two runs had the same requests and responses.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Final, Self

from msgspec import UNSET, DecodeError, Struct, UnsetType, ValidationError, convert, field
from msgspec.json import Encoder, decode, encode
from msgspec.structs import asdict

from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.types import (
    ClientHealth,
    LoadRun,
    PlannedRequest,
    Record,
    RequestSpec,
    Slo,
    TextChunk,
)

FORMAT: Final = "loadgen-events/1"

_REQUEST_FIELDS: Final = (
    "max_tokens",
    "seed",
    "class_name",
    "tenant",
    "session",
    "slo",
    "n",
    "hop",
    "flow_id",
)
_RECORD_FIELDS: Final = (
    *("scheduled_s", "sent_s", "end_s", "verdict", "detail", "finish_reasons", "usage", "metrics"),
    *("status", "connect_s", "stream_id", "empty_s"),
)
"""Fields of `RequestSpec` and `Record` that are stored unchanged."""


class Header(Struct, kw_only=True):
    """The first line: the format, and the settings of the run."""

    format: str = FORMAT
    settings: dict[str, Any]


class RecordLine(Struct, omit_defaults=True):
    """A request and its outcome, with the fields of `loadgen.types` unless described here.

    Attributes:
        chunks: the time, the tokens if reported, and the characters of each chunk.
        asked_sha256: the digest of the prompt, messages or inputs, as JSON.
        answers_sha256: the digest of the text of each choice.
        hops: a line for each request of a flow, if the flow has several.
    """

    index: int
    class_name: str = field(name="class")
    scheduled_s: float
    sent_s: float
    end_s: float
    verdict: str
    max_tokens: int
    seed: int
    chunks: list[tuple[float, int | None, int]]
    asked_sha256: str
    asked_characters: int
    answers_sha256: list[str] = []
    at_s: float | None = None
    tenant: str = ""
    session: str = ""
    slo: Slo = Slo()
    n: int = 1
    extra: dict[str, Any] = {}
    detail: str = ""
    finish_reasons: tuple[str | None, ...] = ()
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    status: int | None = None
    connect_s: float = 0.0
    stream_id: str = ""
    hop: str = ""
    flow_id: str = ""
    facts: dict[str, bool] = {}
    hops: list[RecordLine] = []
    empty_s: tuple[float, ...] = ()


class End(Struct):
    """The outcome of a completed run, with the fields of `LoadRun`."""

    duration_s: float
    scheduled_duration_s: float | None
    health: ClientHealth | None
    interrupted: bool
    lost: Sequence[str] = ()

    @classmethod
    def from_run(cls, run: LoadRun) -> Self:
        """Return the end line of a run."""
        return cls(**{name: getattr(run, name) for name in cls.__struct_fields__})


class EventLine(Struct, omit_defaults=True):
    """Any line after the first."""

    record: RecordLine | UnsetType = UNSET
    end: End | UnsetType = UNSET
    lossless: LosslessCheck | UnsetType = UNSET


class EventWriter:
    """Writes the events of a run while it is in progress.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._encoder = Encoder()
        self._file: IO[bytes] = path.open("wb", buffering=0)  # A crash loses no complete line.
        self._write(Header(settings=settings))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def record(self, record: Record) -> None:
        """Write the outcome of a request."""
        self._write(EventLine(record=_line(record)))

    def end(self, run: LoadRun) -> None:
        """Write the end line of the run."""
        self._write(EventLine(end=End.from_run(run)))

    def lossless(self, check: LosslessCheck) -> None:
        """Write the result of the lossless check."""
        self._write(EventLine(lossless=check))

    def _write(self, line: Struct) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")


def read_events(path: Path) -> tuple[LoadRun, LosslessCheck | None]:
    """Return the run of an event file, and its lossless check or None.

    The records hold no texts. The file may be compressed (`.gz`). A file without an end line gives
    an interrupted run with unknown health.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has another format, or is damaged. The message names file and line.
    """
    lines = _content(path).split(b"\n")
    run, lossless = LoadRun(_settings(path, lines[0]), interrupted=True), None
    last = len(lines) - 1  # The last element is empty or an incomplete line.
    for number, text in enumerate(lines[1:last], 2):
        try:
            line = decode(text, type=EventLine)
        except DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if line.record is not UNSET:
            run.records.append(_record(line.record))
        if line.end is not UNSET:
            for name, value in asdict(line.end).items():
                setattr(run, name, value)
        if line.lossless is not UNSET:
            lossless = line.lossless
    run.records.sort(key=lambda record: record.end_s)  # Several processes write in any order.
    if run.health is None:
        run.duration_s = max((record.end_s for record in run.records), default=0.0)
        instants = [r.planned.at_s for r in run.records if r.planned.at_s is not None]
        run.scheduled_duration_s = max(instants, default=None)
    return run, lossless


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _settings(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = decode(line)
        found = header.get("format") if isinstance(header, dict) else None
        if found == FORMAT:
            return convert(header, Header).settings
    except (DecodeError, ValidationError) as error:
        raise ValueError(f"{path}, line 1: {error}") from None
    raise ValueError(f"{path}: expected the format {FORMAT}, found {found!r}")


def _line(record: Record) -> RecordLine:
    request = record.planned.request
    content = request.prompt if request.prompt is not None else request.messages or request.inputs
    texts = [request.prompt] if request.prompt is not None else list(request.inputs)
    texts += [message.content for message in request.messages]
    return RecordLine(
        index=record.planned.index,
        at_s=record.planned.at_s,
        chunks=[(c.at_s, c.tokens, c.characters) for c in record.chunks],
        asked_sha256=sha256(encode(content)).hexdigest(),
        asked_characters=sum(map(len, texts)),
        answers_sha256=[sha256(encode(answer)).hexdigest() for answer in record.texts],
        extra=dict(request.extra),
        facts=dict(request.facts),
        hops=[_line(hop) for hop in record.hops],
        **{name: getattr(request, name) for name in _REQUEST_FIELDS},
        **{name: getattr(record, name) for name in _RECORD_FIELDS},
    )


def _record(line: RecordLine) -> Record:
    request = RequestSpec(
        prompt="",
        messages=(),
        extra=tuple(line.extra.items()),
        facts=tuple(line.facts.items()),
        **{name: getattr(line, name) for name in _REQUEST_FIELDS},
    )
    return Record(
        PlannedRequest(line.index, line.at_s, request),
        chunks=tuple(TextChunk(*chunk) for chunk in line.chunks),
        hops=tuple(map(_record, line.hops)),
        **{name: getattr(line, name) for name in _RECORD_FIELDS},
    )
