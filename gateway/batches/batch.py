"""Batches and their lines, in the form of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)
"""The endpoints that the lines of a batch may name."""

LONGEST_ID: Final = 512
"""Maximum characters of a custom id."""

MOST_ERRORS: Final = 100
"""Maximum number of errors that the object of a batch lists."""

LONGEST_WINDOW_H: Final = 336
"""Maximum hours of a completion window, which are two weeks."""


class Status(StrEnum):
    """The states of a batch.

    VALIDATING -> IN_PROGRESS -> FINALIZING -> COMPLETED, CANCELLED or EXPIRED
    VALIDATING -> FAILED

    A batch is also CANCELLING for its clients until the gateway that runs it has noticed.
    """

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})


class RequestCounts(Struct):
    """The number of lines of a batch, and of those with a result or an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class LineError(Struct):
    """An error in a line of the input file, whose number begins at 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct):
    """The errors of a batch that has failed."""

    data: list[LineError]
    object: str = "list"


class BatchWait(Struct):
    """The reason why the lines of a batch wait, and the Unix time of their next attempt."""

    code: str
    message: str
    until: int


class Batch(Struct, kw_only=True):
    """A batch. All times are Unix times in seconds.

    Attributes:
        waits: why lines wait although the batch is in progress, such as for the budget of its key,
            or None.
    """

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = Status.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    waits: BatchWait | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the state is final."""
        return self.status in ENDED


class BatchList(Struct):
    """A page of batches."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def view_of(batch: Batch, cancelled_at: int | None) -> Batch:
    """Return a batch as clients see it.

    Args:
        cancelled_at: the time at which a client has cancelled a batch that has not ended, or None.
    """
    if cancelled_at is None:
        return batch
    return replace(batch, status=Status.CANCELLING, cancelling_at=cancelled_at)


def window_s(text: str) -> int | None:
    """Return the seconds of a completion window such as `24h`, or None if it is invalid."""
    found = re.fullmatch("([1-9][0-9]{0,2})h", text)
    if found is None or int(found[1]) > LONGEST_WINDOW_H:
        return None
    return int(found[1]) * 3600


# --- input ----------------------------------------------------------------------------------------


class Line(Struct):
    """A line of the input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=LONGEST_ID)]
    method: str
    url: str
    body: Raw


_line: Final = msgspec.json.Decoder(Line)


def read_line(data: bytes) -> Line:
    """Return a line of the input file.

    Raises:
        ValueError: the line is not of this form.
    """
    return _line.decode(data)


class Checker:
    """The check of all lines of an input file.

    Attributes:
        total: number of lines with a request.
        errors: the errors, at most `MOST_ERRORS`.
    """

    def __init__(self, endpoint: str, most_lines: int) -> None:
        self.total = 0
        self.errors: list[LineError] = []
        self._endpoint = endpoint
        self._most_lines = most_lines
        self._ids: set[str] = set()

    def check(self, lines: Iterable[bytes]) -> None:
        """Check lines until the end, or until `MOST_ERRORS`."""
        for number, data in enumerate(lines, 1):
            if len(self.errors) >= MOST_ERRORS:
                return
            if data.strip():
                self.total += 1
                self._check(number, data)
            if self.total > self._most_lines:
                text = f"the file has more than {self._most_lines} requests; split it"
                self.errors = [LineError("too_many_requests", text)]
                return
        if not self.total:
            self.errors.append(LineError("empty_file", "the file has no request"))

    def _check(self, number: int, data: bytes) -> None:
        try:
            line = read_line(data)
        except (ValueError, RecursionError) as error:
            self._add("invalid_json_line", f"the line is not a request: {error}", number)
            return
        if line.custom_id in self._ids:
            text = f"another line has the custom_id {line.custom_id!r}; make the ids unique"
            self._add("duplicate_custom_id", text, number, "custom_id")
        self._ids.add(line.custom_id)
        if line.method != "POST":
            self._add("invalid_method", "the method must be POST", number, "method")
        if line.url != self._endpoint:
            text = f"the url must be the endpoint of the batch, {self._endpoint}, not {line.url!r}"
            self._add("invalid_url", text, number, "url")

    def _add(self, code: str, message: str, number: int, param: str | None = None) -> None:
        self.errors.append(LineError(code, message, number, param))


# --- output ---------------------------------------------------------------------------------------


class LineResponse(Struct):
    """The response to a line."""

    status_code: int
    request_id: str
    body: Raw


class Failure(Struct):
    """The reason why a line has no response."""

    code: str
    message: str


class Result(Struct):
    """A line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: Failure | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the line belongs to the output file."""
        return self.response is not None and self.response.status_code < 400


_result: Final = msgspec.json.Decoder(Result)


def encode_result(result: Result) -> bytes:
    """Return a result as a line."""
    return msgspec.json.encode(result) + b"\n"


def distinct_results(lines: Iterable[bytes]) -> Iterator[tuple[Result, bytes]]:
    """Yield the first result of each custom id, with its line.

    A gateway that was slow may have written a second result after another one took over its batch.
    """
    seen = set[str]()
    for data in lines:
        found = _result.decode(data)
        if found.custom_id not in seen:
            seen.add(found.custom_id)
            yield found, data
