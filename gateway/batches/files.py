"""The files and batches of all tenants, as blobs.

    tenants/TENANT/files/FILE           the content of a file
    tenants/TENANT/records/FILE         its `FileObject`
    tenants/TENANT/batches/BATCH        a `Batch`
    tenants/TENANT/ended/BATCH          its last state, which no late gateway can replace by another
    tenants/TENANT/cancels/BATCH        the time at which a client has cancelled the batch
    tenants/TENANT/results/BATCH/PART   results, until the batch has ended
    open/BATCH                          the name of the tenant, until the batch has ended

TENANT is a hash, because names of tenants may contain any character. Ids begin with the time, so
that their order is that of creation.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import BinaryIO, Final, TypeVar

import msgspec
from msgspec import Struct

from draftgate.gateway.batches.batch import Batch, view_of
from draftgate.gateway.batches.blobs import Blobs

PURPOSE: Final = "batch"
OUTPUT_PURPOSE: Final = "batch_output"

_FILE_ID: Final = re.compile("file-[0-9a-f]{24}")
_BATCH_ID: Final = re.compile("batch_[0-9a-f]{24}")
_TIME_DIGITS: Final = 13
"""Hexadecimal digits of a time in microseconds, which last until the year 2112."""

T = TypeVar("T", bound=Struct)


class FileObject(Struct):
    """A file, as in OpenAI's API.

    Attributes:
        created_at: Unix time in seconds.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileList(Struct):
    """A page of files."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedFile(Struct):
    """The confirmation that a file is deleted."""

    id: str
    object: str = "file"
    deleted: bool = True


class NotFound(Exception):
    """The tenant has no file or no batch of this id."""


class Files:
    """The files and batches of all tenants.

    All methods wait for the storage, so call them in a thread. They raise OSError if it fails.
    """

    def __init__(self, blobs: Blobs, clock: Callable[[], float]) -> None:
        """Use some blobs.

        Args:
            clock: Unix time in seconds.
        """
        self.blobs = blobs
        self.clock = clock

    # --- files ------------------------------------------------------------------------------------

    def add(self, tenant: str, name: str, purpose: str, chunks: Iterable[bytes]) -> FileObject:
        """Store a file of a tenant."""
        file_id = f"file-{_new_digits(self.clock())}"
        return self.write(tenant, file_id, name, purpose, chunks)

    def write(
        self, tenant: str, file_id: str, name: str, purpose: str, chunks: Iterable[bytes]
    ) -> FileObject:
        """Store a file as `add` does, with an id, and replace an earlier file of this id."""
        found = FileObject(file_id, 0, int(self.clock()), name, purpose)

        def counted() -> Iterator[bytes]:
            for chunk in chunks:
                found.bytes += len(chunk)
                yield chunk

        self.blobs.put(f"{_folder(tenant)}/files/{file_id}", counted())
        self._save(f"{_folder(tenant)}/records/{file_id}", found)
        return found

    def file(self, tenant: str, file_id: str) -> FileObject:
        """Return a file of a tenant.

        Raises:
            NotFound: the tenant has no such file.
        """
        if not _FILE_ID.fullmatch(file_id):
            raise NotFound
        return self._load(f"{_folder(tenant)}/records/{file_id}", FileObject)

    def files(self, tenant: str) -> list[str]:
        """Return the ids of the tenant's files, newest first."""
        return self.blobs.names(f"{_folder(tenant)}/records")[::-1]

    def content(self, tenant: str, file_id: str) -> BinaryIO:
        """Open the content of a file of a tenant.

        Raises:
            NotFound: the tenant has no such file.
        """
        if not _FILE_ID.fullmatch(file_id):
            raise NotFound
        try:
            return self.blobs.open(f"{_folder(tenant)}/files/{file_id}")
        except FileNotFoundError:
            raise NotFound from None

    def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file of a tenant.

        Raises:
            NotFound: the tenant has no such file.
        """
        self.file(tenant, file_id)
        self.blobs.delete(f"{_folder(tenant)}/records/{file_id}")
        self.blobs.delete(f"{_folder(tenant)}/files/{file_id}")

    def in_use(self, tenant: str, file_id: str) -> str | None:
        """Return the id of an open batch of the tenant that reads a file, or None."""
        for batch_id in self.open_batches():
            try:
                if self.record(tenant, batch_id).input_file_id == file_id:
                    return batch_id
            except NotFound:
                continue  # of another tenant
        return None

    # --- batches ----------------------------------------------------------------------------------

    def add_batch(self, tenant: str, batch: Batch) -> None:
        """Store a new batch, which any gateway may run then."""
        # A gateway ignores an open batch without a record, but never finds a record that is not
        # open.
        self.blobs.put(f"open/{batch.id}", [tenant.encode()])
        self.save_batch(tenant, batch)

    def save_batch(self, tenant: str, batch: Batch) -> None:
        """Store the state of a batch. Only the gateway that runs it may do so."""
        folder = "ended" if batch.has_ended else "batches"
        self._save(f"{_folder(tenant)}/{folder}/{batch.id}", batch)

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch of a tenant, as clients see it.

        Raises:
            NotFound: the tenant has no such batch.
        """
        found = self.record(tenant, batch_id)
        return view_of(found, None if found.has_ended else self.cancelled_at(tenant, batch_id))

    def record(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch of a tenant in the state that its gateway has stored.

        Raises:
            NotFound: the tenant has no such batch.
        """
        if not _BATCH_ID.fullmatch(batch_id):
            raise NotFound
        ended = self._read(f"{_folder(tenant)}/ended/{batch_id}")
        if ended is not None:
            return msgspec.json.decode(ended, type=Batch)
        return self._load(f"{_folder(tenant)}/batches/{batch_id}", Batch)

    def batches(self, tenant: str) -> list[str]:
        """Return the ids of the tenant's batches, newest first."""
        return self.blobs.names(f"{_folder(tenant)}/batches")[::-1]

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Ask the gateway that runs a batch to cancel it, and return the batch.

        Raises:
            NotFound: the tenant has no such batch.
        """
        found = self.batch(tenant, batch_id)
        if found.has_ended or found.cancelling_at is not None:
            return found
        now = int(self.clock())
        self.blobs.put(f"{_folder(tenant)}/cancels/{batch_id}", [b"%d" % now])
        return view_of(found, now)

    def cancelled_at(self, tenant: str, batch_id: str) -> int | None:
        """Return the Unix time at which a client has cancelled a batch, or None."""
        found = self._read(f"{_folder(tenant)}/cancels/{batch_id}")
        return None if found is None else int(found)

    def open_batches(self) -> list[str]:
        """Return the ids of the batches of all tenants that have not ended, oldest first."""
        return self.blobs.names("open")

    def owner(self, batch_id: str) -> str | None:
        """Return the tenant of an open batch, or None if it has ended."""
        found = self._read(f"open/{batch_id}")
        return None if found is None else found.decode()

    def close_batch(self, tenant: str, batch_id: str) -> None:
        """Forget that a batch is open, and delete the parts of its results."""
        folder = f"{_folder(tenant)}/results/{batch_id}"
        for part in self.blobs.names(folder):
            self.blobs.delete(f"{folder}/{part}")
        self.blobs.delete(f"{_folder(tenant)}/cancels/{batch_id}")
        self.blobs.delete(f"open/{batch_id}")

    # --- results ----------------------------------------------------------------------------------

    def add_results(self, tenant: str, batch_id: str, part: str, lines: list[bytes]) -> None:
        """Append lines to the results of a batch.

        Args:
            part: a name that no other call uses. The parts are read in the order of their names.
        """
        self.blobs.put(f"{_folder(tenant)}/results/{batch_id}/{part}", lines)

    def results(self, tenant: str, batch_id: str) -> Iterable[bytes]:
        """Yield the lines of all parts."""
        folder = f"{_folder(tenant)}/results/{batch_id}"
        for part in self.blobs.names(folder):
            with closing(self.blobs.open(f"{folder}/{part}")) as file:
                yield from file

    # --- blobs ------------------------------------------------------------------------------------

    def _save(self, name: str, value: Struct) -> None:
        self.blobs.put(name, [msgspec.json.encode(value)])

    def _load(self, name: str, kind: type[T]) -> T:
        found = self._read(name)
        if found is None:
            raise NotFound
        return msgspec.json.decode(found, type=kind)

    def _read(self, name: str) -> bytes | None:
        try:
            with closing(self.blobs.open(name)) as file:
                return file.read()
        except FileNotFoundError:
            return None


def new_batch_id(now_s: float) -> str:
    """Return the id of a batch that begins now.

    Args:
        now_s: Unix time in seconds.
    """
    return f"batch_{_new_digits(now_s)}"


def result_file_id(batch_id: str, kind: str) -> str:
    """Return the id of a file of results, which is the same after a crash.

    Args:
        kind: `output` or `error`.
    """
    digits = batch_id.removeprefix("batch_")
    rest = hashlib.sha256(f"{digits}{kind}".encode()).hexdigest()
    return f"file-{digits[:_TIME_DIGITS]}{rest[: 24 - _TIME_DIGITS]}"


def _new_digits(now_s: float) -> str:
    return f"{round(now_s * 1e6):0{_TIME_DIGITS}x}{secrets.token_hex(6)[:11]}"


def _folder(tenant: str) -> str:
    return f"tenants/{hashlib.sha256(tenant.encode()).hexdigest()[:16]}"
