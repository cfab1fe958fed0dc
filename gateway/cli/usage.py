"""`draftgate usage`, which prints what keys and teams have spent and used as CSV."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from typing import Final, TypeVar

import httpx
import msgspec

from draftgate.addresses import mask_url, read_server_url
from draftgate.gateway.accounts import Period
from draftgate.gateway.budgets import OwnerUsage, UsageReply
from draftgate.gateway.cli.api_client import check_answer
from draftgate.gateway.cli.options import fail
from draftgate.gateway.usage import UsageHistory, UsageRow

_TIMEOUT_S: Final = 30.0
"""Time limit for the response of a server, in seconds."""

Reply = TypeVar("Reply", UsageReply, UsageHistory)


def run_usage(server: str, api_key: str, period: Period | None = None, last: int = 1) -> None:
    """Print the rows that a server returns, after a row of names.

    Without a period, each key and team has a row with its spending in the present period. With one,
    each key has a row for each model that it used in one of the latest periods.

    The process exits with status 1 and one line on stderr if the server has no usage.

    Args:
        last: number of periods, with the present one.
    """
    try:
        address = read_server_url(server)
        if period is None:
            names = OwnerUsage.__struct_fields__
            rows: list[OwnerUsage] | list[UsageRow] = _get(address, api_key, UsageReply).data
        else:
            names, query = UsageRow.__struct_fields__, {"period": period.value, "last": str(last)}
            rows = _get(address, api_key, UsageHistory, "/usage/history", query).data
    except (OSError, ValueError) as error:
        fail(error)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(names)
    table.writerows(msgspec.to_builtins(one).values() for one in rows)


def _get(
    address: str,
    api_key: str,
    reply: type[Reply],
    path: str = "/usage",
    query: Mapping[str, str] | None = None,
) -> Reply:
    """Return what a server responds.

    Raises:
        OSError: the server does not respond, or refuses the query.
        ValueError: the server has no such endpoint.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    shown = mask_url(address)
    try:
        answer = httpx.get(f"{address}{path}", params=query, headers=headers, timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise OSError(f"cannot reach {shown}: {error}") from None
    check_answer(answer, shown, api_key)
    try:
        return msgspec.json.decode(answer.content, type=reply)
    except msgspec.MsgspecError:
        status = answer.status_code
        raise ValueError(f"{shown} has no {path}: it responded with status {status}") from None
