"""Warnings about API keys: budgets that have no effect, and models that nobody serves."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from draftgate.gateway.accounts import Accounts, similar_name
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.logs import log
from draftgate.gateway.node import Node


def use_accounts(node: Node, accounts: Accounts) -> None:
    """Use other accounts of the key file, and warn about them if the node knows its models.

    Raises:
        ValueError: the node would begin or cease to require keys, which needs a restart.
    """
    node.keys.use_file(accounts)
    if node.lifecycle.state is NodeState.READY:
        warn_about_accounts(node)


def warn_about_accounts(node: Node) -> None:
    """Warn about budgets without a price, and about names that no model has at present.

    No name is unknown while an upstream has not sent the list of its models.
    """
    accounts = node.accounts
    limited = [one.owner for one in accounts.all_budgets() if one.is_limited]
    if limited and not accounts.prices and not _have_prices(node):
        why = "no model has a price; add prices to the key file"
        log(logging.WARNING, "budgets have no effect", budgets=", ".join(limited), why=why)
    known = sorted({*_names(node)})  # an upstream may have a model of this node
    for where, name in _named_models(accounts):
        if node.model_named(name) is None:
            why = similar_name(name, known)
            log(logging.WARNING, "no model has this name", model=name, where=where, hint=why)


def _have_prices(node: Node) -> bool:
    return any(getattr(worker.backend, "prices", None) for _, worker in node.workers())


def _named_models(accounts: Accounts) -> Iterator[tuple[str, str]]:
    """Yield the names of models in the key file, and their places."""
    for account in accounts:
        for name in account.models or ():
            yield f"models of the key {account.name}", name
    for name in filter(None, accounts.prices):
        yield "prices", name


def _names(node: Node) -> Iterator[str]:
    """Yield the names of all models and adapters that are known."""
    for model in node.models:
        yield from filter(None, model.names)
        yield from model.fleet.adapters()
        yield from model.fleet.upstream_models.described()
