"""Recorded traffic, read into rows: when requests came and how long they were.

Known forms, told apart by their header or keys:

    Azure LLM inference 2023   CSV: TIMESTAMP, ContextTokens, GeneratedTokens
    BurstGPT                   CSV: Timestamp (s), Model, Request tokens, Response tokens, ...
    Mooncake (FAST 2025)       JSONL: timestamp (ms), input_length, output_length, hash_ids of
                               512-token blocks: equal ids are equal prefixes
    Sarathi-Serve (OSDI 2024)  CSV: num_prefill_tokens, num_decode_tokens, ...: lengths without
                               instants, as if all came at once
    our own                    JSONL: at_s, prompt_tokens, output_tokens; hash_ids, block_tokens,
                               class, tenant if wanted
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

MOONCAKE_BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A recorded request.

    Attributes:
        at_s: seconds after the first request of the trace.
        prompt_tokens, output_tokens: its lengths.
        prefix_ids: names of the prompt's blocks from its beginning; equal ids are equal text.
        block_tokens: tokens of such a block.
        class_name, tenant: what and whose it was, if the trace tells.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    class_name: str = ""
    tenant: str = ""


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Return the rows of a file in order of arrival, whatever their order in the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is of no known form, or a line is damaged; file, line and field are named.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            return parse_trace(file, str(path))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}") from None


def parse_trace(lines: Iterable[str], name: str) -> tuple[TraceRow, ...]:
    """As `read_trace`, of the lines of a file called `name`."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        return ()
    if numbered[0][1].lstrip().startswith("{"):
        records = [(number, _object(line, name, number)) for number, line in numbered]
    else:
        (first, header), *rest = numbered
        names = [field.strip() for field in _fields(header, name, first)]
        records = [
            (number, dict(zip(names, _fields(line, name, number), strict=False)))
            for number, line in rest
        ]
        if not records:
            return ()
    read = _reader(records[0][1], name)
    rows = []
    for number, record in records:
        try:
            rows.append(read(record))
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{name}, line {number}: {what}") from None
    rows.sort(key=lambda row: row.at_s)
    return tuple(replace(row, at_s=row.at_s - rows[0].at_s) for row in rows)


def scaled(rows: Sequence[TraceRow], speed: float) -> tuple[TraceRow, ...]:
    """Return the rows as they come when time passes `speed` times as fast."""
    return tuple(replace(row, at_s=row.at_s / speed) for row in rows)


def at_rate(rows: Sequence[TraceRow], rate_rps: float) -> tuple[TraceRow, ...]:
    """Return the rows scaled to a mean rate: gaps per second of the whole trace.

    Raises:
        ValueError: the rows all came at once, so no scaling gives them a rate.
    """
    length_s = rows[-1].at_s if rows else 0.0
    if length_s <= 0.0:
        raise ValueError("a trace whose requests all came at once cannot be given a rate")
    return scaled(rows, rate_rps * length_s / (len(rows) - 1))


def _object(line: str, name: str, number: int) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{name}, line {number}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name}, line {number}: a JSON object was expected")  # noqa: TRY004
    return value


def _fields(line: str, name: str, number: int) -> list[str]:
    # A line by itself: no known trace has a field that goes over several.
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ValueError(f"{name}, line {number}: not CSV: {error}") from None


def _reader(record: Mapping[str, Any], name: str) -> Callable[[Mapping[str, Any]], TraceRow]:
    for key, read in _FORMS.items():
        if key in record:
            return read
    known = ", ".join(repr(key) for key in _FORMS)
    raise ValueError(f"{name}: no known trace: one of the fields {known} was expected")


def _azure(record: Mapping[str, Any]) -> TraceRow:
    # The trace of 2023 tells no zone; the one of 2024 does.
    moment = datetime.fromisoformat(record["TIMESTAMP"])
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return TraceRow(
        (moment - _EPOCH).total_seconds(),
        _tokens(record, "ContextTokens"),
        _tokens(record, "GeneratedTokens"),
    )


_EPOCH: Final = datetime(2020, 1, 1, tzinfo=UTC)
"""Near the traces: counted from here, instants as floats are right to 0.1 microseconds."""


def _burstgpt(record: Mapping[str, Any]) -> TraceRow:
    return TraceRow(
        _seconds(record, "Timestamp"),
        _tokens(record, "Request tokens"),
        _tokens(record, "Response tokens"),
        class_name=str(record.get("Log Type", "")),
    )


def _mooncake(record: Mapping[str, Any]) -> TraceRow:
    return TraceRow(
        _seconds(record, "timestamp") / 1e3,
        _tokens(record, "input_length"),
        _tokens(record, "output_length"),
        _blocks(record),
    )


def _sarathi(record: Mapping[str, Any]) -> TraceRow:
    return TraceRow(
        0.0, _tokens(record, "num_prefill_tokens"), _tokens(record, "num_decode_tokens")
    )


def _own(record: Mapping[str, Any]) -> TraceRow:
    record = {**_UNSAID, **{key: value for key, value in record.items() if value is not None}}
    return TraceRow(
        _seconds(record, "at_s"),
        _tokens(record, "prompt_tokens"),
        _tokens(record, "output_tokens"),
        _blocks(record),
        _tokens(record, "block_tokens", least=1),
        str(record["class"]),
        str(record["tenant"]),
    )


_UNSAID: Final[Mapping[str, Any]] = {
    "hash_ids": [],
    "block_tokens": MOONCAKE_BLOCK_TOKENS,
    "class": "",
    "tenant": "",
}


_FORMS: Final[dict[str, Callable[[Mapping[str, Any]], TraceRow]]] = {
    "TIMESTAMP": _azure,
    "Timestamp": _burstgpt,
    "input_length": _mooncake,
    "num_prefill_tokens": _sarathi,
    "at_s": _own,
}


def _tokens(record: Mapping[str, Any], field: str, least: int = 0) -> int:
    value = record[field]
    try:
        if isinstance(value, float) and not value.is_integer():
            raise ValueError
        tokens = int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{field} must be a number of tokens, not {value!r}") from None
    if tokens < least:
        raise ValueError(f"{field} must be at least {least}, but is {tokens}")
    return tokens


def _blocks(record: Mapping[str, Any]) -> tuple[int, ...]:
    value = record["hash_ids"]
    if not isinstance(value, list) or not all(isinstance(block, int) for block in value):
        raise ValueError(f"hash_ids must be a list of whole numbers, not {value!r}")
    return tuple(value)


def _seconds(record: Mapping[str, Any], field: str) -> float:
    value = record[field]
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{field} must be a number, not {value!r}") from None
    if not -float("inf") < seconds < float("inf"):
        raise ValueError(f"{field} must be finite")
    return seconds
