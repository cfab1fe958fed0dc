"""The operations about API keys and their usage."""

from __future__ import annotations

from typing import Final

from draftgate.gateway.budgets import UsageReply
from draftgate.gateway.http.endpoints import keys
from draftgate.gateway.http.endpoints.usage import PATH as USAGE_PATH
from draftgate.gateway.http.openapi.operation import Operation, in_path, in_query
from draftgate.gateway.http.requests.schemas import KeyBody, RotationBody
from draftgate.gateway.keys import MOST_CHANGES

_NAME: Final = in_path("name")

ADMINISTRATION: Final = (
    Operation("GET", USAGE_PATH, "Return what keys and teams have spent.", UsageReply),
    Operation("GET", keys.PATH, "List the API keys, without their secrets.", keys.KeyList),
    Operation(
        "POST",
        keys.PATH,
        "Create an API key. Only this response has its secret.",
        keys.NewKey,
        KeyBody,
        errors=(400, 408, 409, 413, 503),
    ),
    Operation(
        "GET",
        keys.KEY_PATH,
        "Return an API key, without its secret.",
        keys.ListedKey,
        errors=(404,),
        parameters=(_NAME,),
    ),
    Operation(
        "DELETE",
        keys.KEY_PATH,
        "Revoke an API key.",
        keys.RevokedKey,
        errors=(404, 409, 503),
        parameters=(_NAME,),
    ),
    Operation(
        "POST",
        keys.ROTATE_PATH,
        "Give an API key another secret. Only this response has it.",
        keys.NewKey,
        RotationBody,
        errors=(400, 404, 408, 409, 413, 503),
        parameters=(_NAME,),
    ),
    Operation(
        "GET",
        keys.AUDIT_PATH,
        "List the latest changes of API keys, newest first.",
        keys.AuditList,
        errors=(400,),
        parameters=(in_query("limit", "Number of changes.", keys.SHOWN_CHANGES, MOST_CHANGES),),
    ),
)
