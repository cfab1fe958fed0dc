"""The endpoint `/usage`, which returns what keys and teams have spent."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from draftgate.gateway.accounts import Role
from draftgate.gateway.budgets import UsageReply
from draftgate.gateway.http.context import ACCOUNT, NODE, json_response

PATH: Final = "/usage"


async def get_usage(request: web.Request) -> web.Response:
    """Return the spending of the key and its team, or for an operator that of all of them."""
    account, node = request[ACCOUNT], request.app[NODE]
    accounts = node.accounts
    sees_all = account.role is Role.OPERATOR
    budgets = accounts.all_budgets() if sees_all else accounts.budgets(account)
    return json_response(UsageReply(await node.budgets.usage(budgets)))
