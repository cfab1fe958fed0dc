"""The endpoints of files, in the form of OpenAI's API.

A file belongs to the tenant whose key has uploaded it. For other keys, it does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, Final, TypeVar, cast

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import BadHttpMessage

from draftgate.gateway.batches.files import (
    OUTPUT_PURPOSE,
    PURPOSE,
    DeletedFile,
    FileList,
    FileObject,
    Files,
    NotFound,
)
from draftgate.gateway.errors import (
    BodyTooLarge,
    FileInUse,
    InvalidRequest,
    NotOffered,
    NotStored,
    RequestTimeout,
    Unavailable,
    Unsupported,
    UnsupportedEncoding,
    invalid,
)
from draftgate.gateway.http.content_encoding import body_encoding
from draftgate.gateway.http.context import ACCOUNT, NODE, json_response, query_number

PATH: Final = "/v1/files"
FILE_PATH: Final = f"{PATH}/{{file_id}}"
CONTENT_PATH: Final = f"{FILE_PATH}/content"

DEFAULT_FILES: Final = 100
MOST_FILES: Final = 1000
ORDERS: Final = ("asc", "desc")

SPOOLED_BYTES: Final = 1 << 20
"""Size up to which an upload waits in memory. The rest waits in a temporary file."""

SENT_BYTES: Final = 256 << 10
_LONGEST_FIELD: Final = 1024
_STORAGE_RETRY_S: Final = 5.0

T = TypeVar("T")


def files_of(request: web.Request) -> Files:
    """Return the files of the node.

    Raises:
        NotOffered: the node stores no files.
    """
    files = request.app[NODE].files
    if files is None:
        raise NotOffered("this server stores no files; start it with --files FOLDER")
    return files


async def in_storage(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function that waits for the storage.

    Raises:
        NotStored: the tenant has no file or batch of the id, which is the last argument.
        Unavailable: the storage failed.
    """
    try:
        return await asyncio.to_thread(work, *arguments)
    except NotFound:
        shown = arguments[-1]
        raise NotStored(f"the API key has no file or batch {shown!r}") from None
    except OSError as error:
        why = f"the storage of files failed: {error.strerror or error}"
        raise Unavailable(why, retry_after_s=_STORAGE_RETRY_S) from error


async def page_of(
    request: web.Request,
    read_ids: Callable[[], Sequence[str]],
    read: Callable[[str], T],
    limit: int,
) -> tuple[list[T], bool]:
    """Return the records of a page, and whether more follow.

    Args:
        read_ids: returns all ids in the order of the list.
        read: returns the record of an id, or raises NotFound to leave it out.
        limit: the size of a page.

    Raises:
        InvalidRequest: `after` is not one of the ids.
        Unavailable: the storage failed.
    """
    after = request.query.get("after")

    def read_page() -> list[T]:
        ids, found = read_ids(), list[T]()
        if after is not None:
            if after not in ids:
                raise invalid("after", f"must be an id of the list, not {after!r}")
            ids = ids[ids.index(after) + 1 :]
        for each in ids:
            with suppress(NotFound):  # another request may have deleted it
                found.append(read(each))
            if len(found) > limit:
                break
        return found

    found = await in_storage(read_page)
    return found[:limit], len(found) > limit


async def create_file(request: web.Request) -> web.Response:
    """Store a file, which the client sends as a form.

    Raises:
        InvalidRequest: the body is not a form with `purpose` and `file`.
        BodyTooLarge: the file exceeds `--max-file-bytes`.
        RequestTimeout: the client paused for too long.
    """
    files = files_of(request)
    if body_encoding(request.headers) is not None:
        raise UnsupportedEncoding("an upload must not have a Content-Encoding", ["identity"])
    if request.content_type != "multipart/form-data":
        raise InvalidRequest("the body must be a form (multipart/form-data)")
    with SpooledTemporaryFile(SPOOLED_BYTES) as spool:
        try:
            name, purpose = await _read_form(request, cast(BinaryIO, spool))
        except (ValueError, AssertionError, web.RequestPayloadError, BadHttpMessage) as error:
            reason = " ".join(str(error).split()).removeprefix("400, message: ")
            raise InvalidRequest(f"the form cannot be read: {reason}") from None
        if purpose is None:
            raise invalid("purpose", "is required")
        if purpose != PURPOSE:
            raise invalid("purpose", f"must be {PURPOSE}, not {purpose!r}")
        if name is None:
            raise invalid("file", "is required")
        spool.seek(0)
        chunks = iter(lambda: spool.read(SENT_BYTES), b"")
        found = await in_storage(files.add, request[ACCOUNT].name, name, purpose, chunks)
    return json_response(found)


async def _read_form(request: web.Request, spool: BinaryIO) -> tuple[str | None, str | None]:
    """Write the file of a form to a spool, and return its name and its purpose."""
    name = purpose = None
    reader = await request.multipart()
    while True:
        part = await _in_time(request, reader.next())
        if part is None:
            return name, purpose
        if not isinstance(part, BodyPartReader):
            raise InvalidRequest("the form must not contain another form")
        if part.name == "file":
            name = part.filename or "file"
            await _read_file(request, part, spool)
        elif part.name == "purpose":
            data = await _in_time(request, part.read_chunk(_LONGEST_FIELD))
            purpose = data.decode("utf-8", "replace")
            await part.release()
        else:
            raise Unsupported(part.name or "a field without a name")


async def _read_file(request: web.Request, part: BodyPartReader, spool: BinaryIO) -> None:
    """Write the file of a form to a spool.

    Raises:
        BodyTooLarge: the file is too large.
    """
    most, size = request.app[NODE].config.max_file_bytes, 0
    while chunk := await _in_time(request, part.read_chunk(SENT_BYTES)):
        size += len(chunk)
        if size > most:
            raise BodyTooLarge(most)
        spool.write(chunk)


async def _in_time(request: web.Request, reading: Any) -> Any:
    """Return what a client sends within `--body-timeout-s`.

    Raises:
        RequestTimeout: the client sent nothing.
    """
    timeout_s = request.app[NODE].config.body_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await reading
    except TimeoutError:
        raise RequestTimeout(f"the client sent nothing for {timeout_s:g} s") from None


async def list_files(request: web.Request) -> web.Response:
    """Return a page of the tenant's files.

    Raises:
        InvalidRequest: a parameter is malformed.
    """
    files, tenant = files_of(request), request[ACCOUNT].name
    limit = query_number(request, "limit", DEFAULT_FILES, MOST_FILES)
    order, purpose = request.query.get("order", "desc"), request.query.get("purpose")
    if order not in ORDERS:
        raise invalid("order", f"must be asc or desc, not {order!r}")
    if purpose not in (None, PURPOSE, OUTPUT_PURPOSE):
        raise invalid("purpose", f"must be {PURPOSE} or {OUTPUT_PURPOSE}, not {purpose!r}")

    def read_ids() -> list[str]:
        newest_first = files.files(tenant)
        return newest_first if order == "desc" else newest_first[::-1]

    def read(file_id: str) -> FileObject:
        found = files.file(tenant, file_id)
        if purpose not in (None, found.purpose):
            raise NotFound
        return found

    data, more = await page_of(request, read_ids, read, limit)
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(FileList(data, first, last, more))


async def get_file(request: web.Request) -> web.Response:
    """Return a file without its content.

    Raises:
        NotStored: the tenant has no such file.
    """
    files, file_id = files_of(request), request.match_info["file_id"]
    return json_response(await in_storage(files.file, request[ACCOUNT].name, file_id))


async def get_content(request: web.Request) -> web.StreamResponse:
    """Send the content of a file.

    Raises:
        NotStored: the tenant has no such file.
    """
    files, file_id = files_of(request), request.match_info["file_id"]
    tenant = request[ACCOUNT].name
    found = await in_storage(files.file, tenant, file_id)
    with closing(await in_storage(files.content, tenant, file_id)) as file:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = found.bytes
        await response.prepare(request)
        while chunk := await asyncio.to_thread(file.read, SENT_BYTES):
            await response.write(chunk)
        await response.write_eof()
    return response


async def delete_file(request: web.Request) -> web.Response:
    """Delete a file.

    Raises:
        NotStored: the tenant has no such file.
        FileInUse: a batch that has not ended reads the file.
    """
    files, file_id = files_of(request), request.match_info["file_id"]
    tenant = request[ACCOUNT].name
    batch_id = await in_storage(files.in_use, tenant, file_id)
    if batch_id is not None:
        raise FileInUse(f"the batch {batch_id} reads the file; cancel it or wait for its end")
    await in_storage(files.delete, tenant, file_id)
    return json_response(DeletedFile(file_id))
