"""`draftgate usage`, which prints what keys and teams have spent as CSV."""

from __future__ import annotations

import csv
import sys
from http import HTTPStatus
from typing import Final

import httpx
import msgspec

from draftgate.addresses import mask_url, read_server_url
from draftgate.gateway.budgets import OwnerUsage, UsageReply
from draftgate.gateway.cli.options import fail

_TIMEOUT_S: Final = 30.0
"""Time limit for the response of a server, in seconds."""


def run_usage(server: str, api_key: str) -> None:
    """Print a row for each key and team that a server returns, after a row of names.

    The process exits with status 1 and one line on stderr if the server has no usage.
    """
    try:
        found = _usage(read_server_url(server), api_key)
    except (OSError, ValueError) as error:
        fail(error)
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(OwnerUsage.__struct_fields__)
    rows.writerows(msgspec.to_builtins(one).values() for one in found.data)


def _usage(address: str, api_key: str) -> UsageReply:
    """Return what a server responds.

    Raises:
        OSError: the server does not respond, or needs another key.
        ValueError: the server has no such endpoint.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    shown = mask_url(address)
    try:
        answer = httpx.get(f"{address}/usage", headers=headers, timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise OSError(f"cannot reach {shown}: {error}") from None
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        raise OSError(f"{shown} requires an API key: pass --api-key or set OPENAI_API_KEY")
    try:
        return msgspec.json.decode(answer.content, type=UsageReply)
    except msgspec.MsgspecError:
        status = answer.status_code
        raise ValueError(f"{shown} has no /usage: it responded with status {status}") from None
