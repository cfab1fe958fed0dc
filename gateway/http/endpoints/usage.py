"""The endpoints `/usage` and `/usage/history`: what keys and teams have spent and used."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from draftgate.gateway.accounts import Period, Role
from draftgate.gateway.budgets import UsageReply
from draftgate.gateway.errors import Unavailable, invalid
from draftgate.gateway.http.context import ACCOUNT, NODE, check_query, json_response, query_number
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.usage import KEPT, UsageHistory

PATH: Final = "/usage"
HISTORY_PATH: Final = "/usage/history"

FILTERS: Final = ("key", "team", "model")
"""The parameters of the query that select rows of the history, which are also their fields."""


async def get_usage(request: web.Request) -> web.Response:
    """Return the spending of the key and its team, or for an operator that of all of them."""
    check_query(request)
    account, node = request[ACCOUNT], request.app[NODE]
    accounts = node.accounts
    sees_all = account.role is Role.OPERATOR
    budgets = accounts.all_budgets() if sees_all else accounts.budgets(account)
    return json_response(UsageReply(await node.budgets.usage(budgets)))


async def get_history(request: web.Request) -> web.Response:
    """Return what keys have used of each model in the latest days or months, the latest first.

    Tenants see only their own key.

    Raises:
        InvalidRequest: a parameter is unknown, or the period or the number of periods is invalid.
        Unavailable: the store does not respond.
    """
    check_query(request, "period", "last", *FILTERS)
    node, named = request.app[NODE], request.query.get("period", Period.DAY)
    if named not in set(Period):
        raise invalid("period", f"must be day or month, not {named!r}")
    period, tenant = Period(named), request[ACCOUNT].sees_tenant
    try:
        rows = await node.usage.rows(period, query_number(request, "last", 1, KEPT[period]))
    except StoreError as error:
        raise Unavailable("the store of usage does not respond", retry_after_s=1) from error
    wanted = {name: request.query[name] for name in FILTERS if name in request.query}
    if tenant is not None:
        rows = [row for row in rows if row.key == tenant]
    return json_response(
        UsageHistory(
            [
                row
                for row in rows
                if all(getattr(row, name) == value for name, value in wanted.items())
            ]
        )
    )
