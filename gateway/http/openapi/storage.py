"""The operations of files and batches."""

from __future__ import annotations

from typing import Final

from draftgate.gateway.batches.batch import Batch, BatchList
from draftgate.gateway.batches.files import (
    OUTPUT_PURPOSE,
    PURPOSE,
    DeletedFile,
    FileList,
    FileObject,
)
from draftgate.gateway.http.endpoints import batches, files
from draftgate.gateway.http.openapi.operation import Operation, in_path, in_query, in_query_text
from draftgate.gateway.http.requests.schemas import BatchBody

_FILE_ID: Final = in_path("file_id", pattern="^file-[0-9a-f]{24}$")
_BATCH_ID: Final = in_path("batch_id", pattern="^batch_[0-9a-f]{24}$")
_AFTER: Final = in_query_text("after", "The id that precedes the page.")

STORAGE_OPERATIONS: Final = (
    Operation(
        "POST",
        files.PATH,
        "Store a file of requests.",
        FileObject,
        form={
            "purpose": {"type": "string", "enum": [PURPOSE]},
            "file": {
                "type": "string",
                "contentMediaType": "application/jsonl",
                "description": "A file with one request per line.",
            },
        },
        errors=(400, 408, 413, 501, 503),
    ),
    Operation(
        "GET",
        files.PATH,
        "List the files.",
        FileList,
        errors=(400, 501, 503),
        parameters=(
            in_query("limit", "Number of files.", files.DEFAULT_FILES, files.MOST_FILES),
            in_query_text("order", "The order of the files.", enum=list(files.ORDERS)),
            in_query_text("purpose", "Only these files.", enum=[PURPOSE, OUTPUT_PURPOSE]),
            _AFTER,
        ),
    ),
    Operation(
        "GET",
        files.FILE_PATH,
        "Return a file without its content.",
        FileObject,
        errors=(404, 501, 503),
        parameters=(_FILE_ID,),
    ),
    Operation(
        "DELETE",
        files.FILE_PATH,
        "Delete a file.",
        DeletedFile,
        errors=(404, 409, 501, 503),
        parameters=(_FILE_ID,),
    ),
    Operation(
        "GET",
        files.CONTENT_PATH,
        "Return the content of a file.",
        ("application/octet-stream",),
        errors=(404, 501, 503),
        parameters=(_FILE_ID,),
    ),
    Operation(
        "POST",
        batches.PATH,
        "Create a batch of the requests in a file.",
        Batch,
        BatchBody,
        errors=(400, 404, 408, 413, 501, 503),
    ),
    Operation(
        "GET",
        batches.PATH,
        "List the batches, newest first.",
        BatchList,
        errors=(400, 501, 503),
        parameters=(
            in_query("limit", "Number of batches.", batches.DEFAULT_BATCHES, batches.MOST_BATCHES),
            _AFTER,
        ),
    ),
    Operation(
        "GET",
        batches.BATCH_PATH,
        "Return a batch.",
        Batch,
        errors=(404, 501, 503),
        parameters=(_BATCH_ID,),
    ),
    Operation(
        "POST",
        batches.CANCEL_PATH,
        "Cancel a batch.",
        Batch,
        errors=(404, 501, 503),
        parameters=(_BATCH_ID,),
    ),
)
