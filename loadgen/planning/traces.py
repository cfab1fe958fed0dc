"""Reads recorded traffic: the arrival time and the lengths of each request.

The reader recognises the format by its header or keys:

    Azure LLM inference 2023   CSV: TIMESTAMP, ContextTokens, GeneratedTokens
    BurstGPT                   CSV: Timestamp (s), Model, Request tokens, Response tokens, ...
    Mooncake (FAST 2025)       JSONL: timestamp (ms), input_length, output_length, hash_ids of
                               512-token blocks (equal ids are equal prefixes)
    Sarathi-Serve (OSDI 2024)  CSV: num_prefill_tokens, num_decode_tokens, ... (lengths without
                               times, so all requests arrive simultaneously)
    Draftgate                  JSONL or CSV: at_s (or timestamp_s), prompt_tokens (or input_tokens),
                               output_tokens, and optionally hash_ids, block_tokens, class, tenant
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, Final

MOONCAKE_BLOCK_TOKENS: Final = 512

_EPOCH: Final = datetime(2020, 1, 1, tzinfo=UTC)
"""An origin near the dates of the traces, from which floats are accurate to 0.1 microseconds."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A recorded request.

    Attributes:
        at_s: seconds after the first request of the trace.
        prompt_tokens, output_tokens: its lengths.
        prefix_ids: ids of the prompt's blocks from its beginning. Equal ids mean equal text. The
            last block may extend beyond the prompt.
        block_tokens: tokens per block.
        class_name, tenant: empty if the trace has none.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    class_name: str = ""
    tenant: str = ""


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Return the rows of a file in order of arrival, regardless of their order in the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the format is unknown, or a line is malformed. The message names file, line and
            field.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            return parse_trace(file, str(path))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}") from None


def parse_trace(lines: Iterable[str], name: str) -> tuple[TraceRow, ...]:
    """Return the rows of the lines of a file with that name, as `read_trace` does."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    header: list[str] = []
    read: Callable[[Mapping[str, Any]], TraceRow] | None = None
    rows = []
    for number, line in numbered:
        try:
            if numbered[0][1].lstrip().startswith("{"):
                record = _json_record(line)
            elif not header:
                header = [field.strip() for field in _csv_fields(line)]
                continue
            else:
                record = dict(zip(header, _csv_fields(line), strict=False))
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        read = read or _reader(record, name)
        try:
            rows.append(read(record))
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{name}, line {number}: {what}") from None
    rows.sort(key=lambda row: row.at_s)
    return tuple(replace(row, at_s=row.at_s - rows[0].at_s) for row in rows)


def scaled(rows: Sequence[TraceRow], speed: float) -> tuple[TraceRow, ...]:
    """Return the rows with arrival times divided by `speed`."""
    return tuple(replace(row, at_s=row.at_s / speed) for row in rows)


def at_rate(rows: Sequence[TraceRow], rate_rps: float) -> tuple[TraceRow, ...]:
    """Return the rows scaled to a mean rate: gaps per second of the whole trace.

    Raises:
        ValueError: all requests arrive simultaneously, so scaling cannot set a rate.
    """
    length_s = rows[-1].at_s if rows else 0.0
    if length_s <= 0.0:
        raise ValueError(
            "the requests of the trace arrive simultaneously, so they have no rate: give --arrival,"
            " such as poisson"
        )
    return scaled(rows, rate_rps * length_s / (len(rows) - 1))


def _json_record(line: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")  # noqa: TRY004 - the file is at fault
    return value


def _csv_fields(line: str) -> list[str]:
    # No known trace has a field that spans several lines.
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from None


def _reader(record: Mapping[str, Any], name: str) -> Callable[[Mapping[str, Any]], TraceRow]:
    for key, read in _FORMATS.items():
        if key in record:
            return read
    raise ValueError(
        f"{name}: unknown trace format with the fields {', '.join(map(repr, record))}: expected"
        f" {'; or '.join(_FIELDS)}"
    )


def _azure(record: Mapping[str, Any]) -> TraceRow:
    # The trace of 2023 has no time zone, but that of 2024 does.
    moment = datetime.fromisoformat(record["TIMESTAMP"])
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return TraceRow(
        (moment - _EPOCH).total_seconds(),
        _tokens(record, "ContextTokens"),
        _tokens(record, "GeneratedTokens"),
    )


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
    given = {key: value for key, value in record.items() if value is not None}
    record = {"hash_ids": [], "block_tokens": MOONCAKE_BLOCK_TOKENS, **given}
    return TraceRow(
        _seconds(record, "timestamp_s" if "timestamp_s" in record else "at_s"),
        _tokens(record, "input_tokens" if "input_tokens" in record else "prompt_tokens"),
        _tokens(record, "output_tokens"),
        _blocks(record),
        _tokens(record, "block_tokens", least=1),
        str(record.get("class", "")),
        str(record.get("tenant", "")),
    )


_FORMATS: Final[dict[str, Callable[[Mapping[str, Any]], TraceRow]]] = {
    "TIMESTAMP": _azure,
    "Timestamp": _burstgpt,
    "input_length": _mooncake,
    "num_prefill_tokens": _sarathi,
    "at_s": _own,
    "timestamp_s": _own,
}

_FIELDS: Final = (
    "at_s (or timestamp_s), prompt_tokens (or input_tokens) and output_tokens",
    "TIMESTAMP, ContextTokens and GeneratedTokens (Azure)",
    "Timestamp, Request tokens and Response tokens (BurstGPT)",
    "timestamp, input_length, output_length and hash_ids (Mooncake)",
    "num_prefill_tokens and num_decode_tokens (Sarathi-Serve)",
)
"""The accepted forms, for the error about an unknown one."""


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
        raise ValueError(f"hash_ids must be a list of integers, not {value!r}")
    return tuple(value)


def _seconds(record: Mapping[str, Any], field: str) -> float:
    value = record[field]
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{field} must be a number, not {value!r}") from None
    if not isfinite(seconds):
        raise ValueError(f"{field} must be finite")
    return seconds
