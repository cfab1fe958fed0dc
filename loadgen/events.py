"""What happened in a run, as JSON lines: every figure can be computed from them again.

    {"format": "loadgen-events/1", "settings": {...}}
    {"record": {"index": 0, "class": "code", ..., "chunks": [[at_s, tokens, characters], ...]}}
    {"end": {"duration_s": ..., "health": {...}, ...}}
    {"lossless": {...}}

A line is written when a request is over, so a run that crashes leaves what was known: then the end
is missing, and the last line may be half written. Instants are seconds from the start of the
run. Prompts and answers are not kept, only their lengths and SHA-256: the files are smaller, tell
nobody's text, and still show whether two runs were asked and answered the same.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from msgspec import UNSET, DecodeError, Struct, UnsetType, ValidationError, convert, field
from msgspec.json import Encoder, decode, encode

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


class Header(Struct, kw_only=True):
    """The first line: the form, and the settings of the run."""

    format: str = FORMAT
    settings: dict[str, Any]


class RecordLine(Struct, omit_defaults=True):
    """A request and what became of it; fields as in `loadgen.types`, unless described here.

    Attributes:
        chunks: of each its instant, its tokens if told, its characters.
        asked_sha256: of the body's prompt or messages, as JSON.
        answers_sha256: of each choice's text.
        hops: of a question that took several requests, each of them.
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
    finish_reasons: list[str | None] = []
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    status: int | None = None
    connect_s: float = 0.0
    stream_id: str = ""
    hop: str = ""
    facts: dict[str, bool] = {}
    hops: list[RecordLine] = []
    empty_s: list[float] = []


class End(Struct):
    """What is known when the run is over."""

    duration_s: float
    scheduled_duration_s: float | None
    health: ClientHealth | None
    interrupted: bool
    lost: Sequence[str] = ()

    @classmethod
    def of(cls, run: LoadRun) -> Self:
        """Return the end of a run."""
        schedule_s = run.scheduled_duration_s
        return cls(run.duration_s, schedule_s, run.health, run.interrupted, run.lost)


class Line(Struct, omit_defaults=True):
    """Any line but the first."""

    record: RecordLine | UnsetType = UNSET
    end: End | UnsetType = UNSET
    lossless: LosslessCheck | UnsetType = UNSET


class EventWriter:
    """Writes a run's lines while it goes on.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._encoder = Encoder()
        self._file: IO[bytes] = path.open("wb", buffering=0)  # each line is one write: none is lost
        self._write(Header(settings=settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def record(self, record: Record) -> None:
        """Write what became of a request."""
        self._write(Line(record=_line(record)))

    def end(self, run: LoadRun) -> None:
        """Write what is known when the run is over."""
        self._write(Line(end=End.of(run)))

    def lossless(self, check: LosslessCheck) -> None:
        """Write what replaying showed."""
        self._write(Line(lossless=check))

    def _write(self, line: Struct) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")


def read_events(path: Path) -> tuple[LoadRun, LosslessCheck | None]:
    """Return the run of a file, and its lossless check if there was one.

    The records hold no texts. The file may be compressed (`.gz`). A file without its last line
    gives a run that was interrupted and whose health is not known.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not of this form, or damaged; file and line are named.
    """
    lines = _content(path).split(b"\n")
    run, lossless = LoadRun(_header(path, lines[0]), interrupted=True), None
    last = len(lines) - 1  # empty, or half written
    for number, text in enumerate(lines[1:last], 2):
        try:
            line = decode(text, type=Line)
        except DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if line.record is not UNSET:
            run.records.append(_record(line.record))
        if line.end is not UNSET:
            end = line.end
            run.duration_s, run.interrupted = end.duration_s, end.interrupted
            run.scheduled_duration_s, run.health = end.scheduled_duration_s, end.health
            run.lost = end.lost
        if line.lossless is not UNSET:
            lossless = line.lossless
    run.records.sort(key=lambda record: record.end_s)  # several processes' came in any order
    if run.health is None:
        run.duration_s = max((record.end_s for record in run.records), default=0.0)
        run.scheduled_duration_s = _last_instant(run.records)
    return run, lossless


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = decode(line)
        form = header.get("format") if isinstance(header, dict) else None
        if form == FORMAT:
            return convert(header, Header).settings
    except (DecodeError, ValidationError) as error:
        raise ValueError(f"{path}, line 1: {error}") from None
    raise ValueError(f"{path} is not of the form {FORMAT} but {form!r}")


def _last_instant(records: Iterable[Record]) -> float | None:
    instants = [r.planned.at_s for r in records if r.planned.at_s is not None]
    return max(instants, default=None)


def _line(record: Record) -> RecordLine:
    question = record.planned.request
    asked = question.prompt if question.prompt is not None else question.messages or question.inputs
    text = encode(asked)
    return RecordLine(
        index=record.planned.index,
        class_name=question.class_name,
        scheduled_s=record.scheduled_s,
        sent_s=record.sent_s,
        end_s=record.end_s,
        verdict=record.verdict,
        max_tokens=question.max_tokens,
        seed=question.seed,
        chunks=[(c.at_s, c.tokens, c.characters) for c in record.chunks],
        asked_sha256=sha256(text).hexdigest(),
        asked_characters=sum(map(len, _texts(question))),
        answers_sha256=[sha256(encode(answer)).hexdigest() for answer in record.texts],
        at_s=record.planned.at_s,
        tenant=question.tenant,
        session=question.session,
        slo=question.slo,
        n=question.n,
        extra=dict(question.extra),
        detail=record.detail,
        finish_reasons=list(record.finish_reasons),
        usage=record.usage,
        metrics=record.metrics,
        status=record.status,
        connect_s=record.connect_s,
        stream_id=record.stream_id,
        hop=question.hop,
        facts=dict(question.facts),
        hops=[_line(hop) for hop in record.hops],
        empty_s=list(record.empty_s),
    )


def _texts(question: RequestSpec) -> list[str]:
    if question.prompt is not None:
        return [question.prompt]
    return [message.content for message in question.messages] or list(question.inputs)


def _record(line: RecordLine) -> Record:
    question = RequestSpec(
        prompt="",
        messages=(),
        max_tokens=line.max_tokens,
        seed=line.seed,
        class_name=line.class_name,
        tenant=line.tenant,
        session=line.session,
        slo=line.slo,
        n=line.n,
        extra=tuple(line.extra.items()),
        hop=line.hop,
        facts=tuple(line.facts.items()),
    )
    return Record(
        PlannedRequest(line.index, line.at_s, question),
        line.scheduled_s,
        line.sent_s,
        line.end_s,
        line.verdict,
        line.detail,
        tuple(TextChunk(*chunk) for chunk in line.chunks),
        (),
        tuple(line.finish_reasons),
        line.usage,
        line.metrics,
        line.status,
        line.connect_s,
        stream_id=line.stream_id,
        hops=tuple(map(_record, line.hops)),
        empty_s=tuple(line.empty_s),
    )
