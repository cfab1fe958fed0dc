"""The operations about API keys and their usage."""

from __future__ import annotations

from typing import Final

from draftgate.gateway.accounts import Period
from draftgate.gateway.budgets import UsageReply
from draftgate.gateway.created_keys import MOST_CHANGES
from draftgate.gateway.http.endpoints import keys, usage
from draftgate.gateway.http.openapi.operation import Operation, in_path, in_query, in_query_text
from draftgate.gateway.http.requests.schemas import KeyBody, KeyChangesBody, RotationBody
from draftgate.gateway.usage import KEPT, UsageHistory

_NAME: Final = in_path("name", minLength=1, maxLength=1024)

ADMINISTRATION: Final = (
    Operation("GET", usage.PATH, "Return what keys and teams have spent.", UsageReply),
    Operation(
        "GET",
        usage.HISTORY_PATH,
        "Return what keys have used of each model in the latest days or months.",
        UsageHistory,
        errors=(400, 503),
        parameters=(
            in_query_text("period", "The kind of periods.", enum=list(Period), default="day"),
            in_query("last", "Number of periods, at most 13 months.", 1, KEPT[Period.DAY]),
            *(in_query_text(name, f"The name of the {name}.") for name in usage.FILTERS),
        ),
    ),
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
        "PATCH",
        keys.KEY_PATH,
        "Change settings of an API key.",
        keys.ListedKey,
        KeyChangesBody,
        errors=(400, 404, 408, 409, 413, 503),
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
