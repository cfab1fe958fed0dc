"""Files that the node loads again when they change, such as certificates and API keys.

The node compares the state of the files once a second. Kubernetes replaces mounted secrets by a
symbolic link, which such a comparison notices. SIGHUP makes the node read the files at once, even
if their state is the same, for example on a file system with coarse times. If new contents are
invalid, the old contents stay in use, and the node logs the reason once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

from draftgate.gateway.logs import log

CHECK_S: Final = 1.0
"""Interval of the checks. The state of a file takes a few microseconds."""

T = TypeVar("T")

_State = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles(Generic[T]):
    """Some files that are read together."""

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Note the state of the files, which the caller then reads for the first time.

        Args:
            what: the contents of the files, for logs.
            read: reads all files, in any thread. It raises `OSError` or `ValueError` for contents
                that cannot be used.
        """
        self._what = what
        self._paths = paths
        self._seen = self._state()
        self._requested = asyncio.Event()
        self.read = read

    def request(self) -> None:
        """Let the next check read the files in any case, and begin it now if the files are checked.

        Without files, the call has no effect.
        """
        if self._paths:
            self._requested.set()

    async def requested(self, timeout_s: float) -> None:
        """Wait for `request`, or until a time has passed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._requested.wait(), timeout_s)

    async def check(self, apply: Callable[[T], None]) -> None:
        """Read the files if they have changed or `request` was called, and apply their contents.

        Args:
            apply: uses the contents, on the thread of the event loop. It raises as `read` does.
        """
        state = await asyncio.to_thread(self._state)
        if state == self._seen and not self._requested.is_set():
            return
        self._seen = state
        self._requested.clear()
        try:
            apply(await asyncio.to_thread(self.read))
        except (OSError, ValueError) as error:
            kept = f"cannot reload {self._what}, so the previous ones stay in use"
            log(logging.ERROR, kept, reason=str(error))
        else:
            log(logging.INFO, f"reloaded {self._what}")

    def _state(self) -> _State:
        """Return inode, time of change and size of each file, or None for a missing file."""
        return tuple(map(_file_state, self._paths))


def _file_state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@asynccontextmanager
async def reloading(files: WatchedFiles[T], apply: Callable[[T], None]) -> AsyncIterator[None]:
    """Check files once a second, and whenever `request` is called, until the block ends."""
    task = asyncio.create_task(_check_forever(files, apply))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _check_forever(files: WatchedFiles[T], apply: Callable[[T], None]) -> None:
    while True:
        await files.requested(CHECK_S)
        await files.check(apply)
