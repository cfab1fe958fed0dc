"""Files to which a node appends JSON objects, one per line.

The event loop only appends records in memory, and the heartbeat writes them once a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from draftgate.gateway.logs import log

MOST_UNWRITTEN: Final = 100_000
"""Maximum records kept while the file cannot be written. Older records are dropped."""


class JsonLinesFile:
    """A file of records.

    Use the object only on the thread of the event loop, except for `write`.
    """

    def __init__(self, path: Path, setting: str) -> None:
        """Create the file if it does not exist.

        Args:
            setting: the setting with the path, for messages.

        Raises:
            ValueError: the file cannot be written.
        """
        try:
            path.open("ab").close()
        except OSError as error:
            raise ValueError(f"{setting} {path}: {error.strerror or error}") from None
        self._path = path
        self._setting = setting
        self._unwritten: deque[msgspec.Struct] = deque(maxlen=MOST_UNWRITTEN)
        self._failing = False

    def append(self, record: msgspec.Struct) -> None:
        """Add a record, which the next `write` writes as it then is."""
        self._unwritten.append(record)

    def write(self) -> None:
        """Append new records to the file.

        The method blocks, so call it in a thread.

        Raises:
            OSError: the file cannot be written. The records are kept, and the file has no part of
                them, if it can be shortened.
        """
        taken = [self._unwritten.popleft() for _ in range(len(self._unwritten))]
        data = b"".join(msgspec.json.encode(record) + b"\n" for record in taken)
        try:
            self._write(data)
        except OSError:
            self._unwritten.extendleft(reversed(taken))
            raise

    async def flush(self) -> None:
        """Write new records in a thread. The first of several failures is logged."""
        if not self._unwritten:
            return
        try:
            await asyncio.to_thread(self.write)
        except OSError as error:
            if not self._failing:
                reason = error.strerror or str(error)
                log(logging.WARNING, f"cannot write {self._setting}; records wait", reason=reason)
            self._failing = True
            return
        if self._failing:
            log(logging.INFO, f"{self._setting} is written again")
        self._failing = False

    def _write(self, data: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            if self._is_cut():
                data = b"\n" + data
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                self._remove(file, len(data) - len(rest))
                raise

    def _is_cut(self) -> bool:
        """Return whether the file ends within a line, for example after a crash of the machine."""
        with suppress(OSError):
            if self._path.is_file() and self._path.stat().st_size:  # other files may block
                with self._path.open("rb") as file:
                    file.seek(-1, os.SEEK_END)
                    return file.read(1) != b"\n"
        return False

    @staticmethod
    def _remove(file: FileIO, count: int) -> None:
        """Remove the last bytes that this process wrote, unless another process wrote after them.

        A part of a line that stays is completed by a line break before the next record.
        """
        with suppress(OSError):  # a device has no length
            end = file.tell()
            if count and os.fstat(file.fileno()).st_size == end:
                file.truncate(end - count)


def lines_file(setting: str, path: str | None) -> JsonLinesFile | None:
    """Return the file of a setting, or None without a path.

    Raises:
        ValueError: the file cannot be written.
    """
    return None if path is None else JsonLinesFile(Path(path), setting)
