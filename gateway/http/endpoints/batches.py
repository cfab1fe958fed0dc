"""The endpoints of batches, in the form of OpenAI's API."""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec
from aiohttp import web

from draftgate.gateway.batches.batch import (
    ENDPOINTS,
    LONGEST_WINDOW_H,
    Batch,
    BatchList,
    window_s,
)
from draftgate.gateway.batches.files import PURPOSE, new_batch_id
from draftgate.gateway.errors import invalid
from draftgate.gateway.http.batch_lines import BATCHES
from draftgate.gateway.http.context import ACCOUNT, json_response, query_number, read_body
from draftgate.gateway.http.endpoints.files import files_of, in_storage, page_of
from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.schemas import BatchBody

PATH: Final = "/v1/batches"
BATCH_PATH: Final = f"{PATH}/{{batch_id}}"
CANCEL_PATH: Final = f"{BATCH_PATH}/cancel"

DEFAULT_BATCHES: Final = 20
MOST_BATCHES: Final = 100

MOST_METADATA: Final = 16
LONGEST_KEY: Final = 64
LONGEST_VALUE: Final = 512
"""OpenAI's bounds of metadata."""

_decoder: Final = msgspec.json.Decoder(BatchBody)


async def create_batch(request: web.Request) -> web.Response:
    """Create a batch, which runs when the workers have capacity.

    Raises:
        InvalidRequest: a field is malformed.
        NotStored: the tenant has no such file.
    """
    files, tenant = files_of(request), request[ACCOUNT].name
    body = decode(await read_body(request), _decoder)
    if body.endpoint not in ENDPOINTS:
        text = f"must be one of {', '.join(ENDPOINTS)}, not {body.endpoint!r}"
        raise invalid("endpoint", text)
    seconds = window_s(body.completion_window)
    if seconds is None:
        text = f"must be a number of hours from 1h to {LONGEST_WINDOW_H}h, such as 24h"
        raise invalid("completion_window", text)
    _check_metadata(body.metadata)
    file = await in_storage(files.file, tenant, body.input_file_id)
    if file.purpose != PURPOSE:
        raise invalid("input_file_id", f"the purpose of the file is not {PURPOSE}")
    now_s = files.clock()
    batch = Batch(
        id=new_batch_id(now_s),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=int(now_s),
        expires_at=int(now_s) + seconds,
        metadata=body.metadata,
    )
    await in_storage(files.add_batch, tenant, batch)
    request.app[BATCHES].wake()
    return json_response(batch)


def _check_metadata(metadata: dict[str, str] | None) -> None:
    """Check the bounds of metadata.

    Raises:
        InvalidRequest: there are too many keys, or a key or value is too long.
    """
    pairs = metadata or {}
    if len(pairs) > MOST_METADATA:
        raise invalid("metadata", f"must have at most {MOST_METADATA} keys")
    for key, value in pairs.items():
        if len(key) > LONGEST_KEY or len(value) > LONGEST_VALUE:
            text = f"keys have at most {LONGEST_KEY} characters, and values {LONGEST_VALUE}"
            raise invalid("metadata", text)


async def list_batches(request: web.Request) -> web.Response:
    """Return a page of the tenant's batches, newest first.

    Raises:
        InvalidRequest: a parameter is malformed.
    """
    files, tenant = files_of(request), request[ACCOUNT].name
    limit = query_number(request, "limit", DEFAULT_BATCHES, MOST_BATCHES)
    read_ids, read = partial(files.batches, tenant), partial(files.batch, tenant)
    data, more = await page_of(request, read_ids, read, limit)
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(BatchList(data, first, last, more))


async def get_batch(request: web.Request) -> web.Response:
    """Return a batch.

    Raises:
        NotStored: the tenant has no such batch.
    """
    files, batch_id = files_of(request), request.match_info["batch_id"]
    return json_response(await in_storage(files.batch, request[ACCOUNT].name, batch_id))


async def cancel_batch(request: web.Request) -> web.Response:
    """Cancel a batch. Its results so far remain.

    Raises:
        NotStored: the tenant has no such batch.
    """
    files, batch_id = files_of(request), request.match_info["batch_id"]
    found = await in_storage(files.cancel, request[ACCOUNT].name, batch_id)
    request.app[BATCHES].wake()
    return json_response(found)
