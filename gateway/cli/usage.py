"""`draftgate usage`, which prints what keys and teams have spent and used as CSV."""

from __future__ import annotations

import csv
import sys

import msgspec

from draftgate.addresses import read_server_url
from draftgate.gateway.accounts import Period
from draftgate.gateway.budgets import OwnerUsage, UsageReply
from draftgate.gateway.cli.api_client import fetch
from draftgate.gateway.cli.options import fail
from draftgate.gateway.usage import UsageHistory, UsageRow


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
            rows: list[OwnerUsage] | list[UsageRow]
            rows = fetch(address, "/usage", UsageReply, api_key).data
        else:
            names, query = UsageRow.__struct_fields__, {"period": period.value, "last": str(last)}
            rows = fetch(address, "/usage/history", UsageHistory, api_key, query).data
    except (OSError, ValueError) as error:
        fail(error)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(names)
    table.writerows(msgspec.to_builtins(one).values() for one in rows)
