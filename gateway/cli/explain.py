"""`draftgate explain`, which shows recorded decisions and replays them under another policy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import typer

from draftgate.addresses import mask_url, read_server_url
from draftgate.gateway.cli.api_client import fetch
from draftgate.gateway.cli.options import fail
from draftgate.gateway.dispatch.decisions import KEPT, Decision, read_decisions
from draftgate.gateway.telemetry.recent_drafts import DecisionList
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView, SpeculationPlan


def run_explain(
    source: str, policy: str | None, request_id: str | None, api_key: str, *, as_json: bool
) -> None:
    """Print the decisions of a file or a server.

    The process exits with status 1 and one line on stderr if it finds no decisions.
    """
    try:
        other = None if policy is None else speculation_policy(policy)
        chosen = [d for d in _decisions(source, api_key) if request_id in {None, d.request_id}]
    except (OSError, ValueError) as error:
        fail(error)
    if not chosen:
        fail(f"no matching decision in {mask_url(source)}")
    for decision in chosen:
        replayed = None if other is None else decision.under(other)
        typer.echo(_as_json(decision, replayed) if as_json else _as_text(decision, replayed))
    if other is not None and not as_json:
        typer.echo(_difference(chosen, other))


def _decisions(source: str, api_key: str) -> Iterable[Decision]:
    """Return recorded decisions, oldest first.

    Args:
        source: the path of a file, or the address of a server.

    Raises:
        OSError: the file cannot be read, or the server does not respond or refuses the query.
        ValueError: the content is not a list of decisions.
    """
    if "://" not in source and not _looks_like_server(source):
        return read_decisions(Path(source))
    address = read_server_url(source)
    found = fetch(address, "/decisions", DecisionList, api_key, {"limit": str(KEPT)})
    return reversed(found.decisions)


def _looks_like_server(source: str) -> bool:
    """Return whether a source without a scheme is an address, such as `localhost:8000`."""
    return not Path(source).exists() and re.fullmatch(r"[^/]+:[0-9]+(/.*)?", source) is not None


def _as_json(decision: Decision, replayed: SpeculationPlan | None) -> str:
    return msgspec.json.encode({"decision": decision, "replayed": replayed}).decode()


def _as_text(decision: Decision, replayed: SpeculationPlan | None) -> str:
    route = decision.route
    routed = f", routed by {route.policy}, {route.reason}" if route else ""
    plans = [decision.plan] if replayed is None else [decision.plan, replayed]
    lines = [
        f"{decision.request_id} on {decision.worker_id}{routed}",
        f"{_request(decision.request)}; {_load(decision)}",
        _history(decision.request),
    ]
    return "\n  ".join([*filter(None, lines), *map(_plan, plans), *_outcome(decision)])


def _request(request: RequestView) -> str:
    text = (
        f"{request.prompt_tokens} prompt tokens, up to {request.max_tokens} new, temperature "
        f"{request.temperature:g}, mode {request.mode.value}"
    )
    service = request.service
    for name, seconds in (("TTFT", service.ttft_s), ("TPOT", service.tpot_s)):
        text += "" if seconds is None else f", {name} within {seconds * 1e3:g} ms"
    return text if service.priority == 0 else f"{text}, priority {service.priority}"


def _load(decision: Decision) -> str:
    """Return the load of the worker, its age, and whether the state store was unavailable."""
    load = decision.load
    age = f", {decision.load_age_s * 1e3:.0f} ms old" if decision.load_age_s else ""
    degraded = ", without the state store" if decision.degraded else ""
    return (
        f"{load.running} running, {load.waiting} waiting, price {load.price:.3f}, "
        f"acceptance {load.acceptance:.2f}{age}{degraded}"
    )


def _history(request: RequestView) -> str:
    """Return the draft statistics of earlier requests, or an empty string without any."""
    known = [] if request.repetition is None else [f"repetition {request.repetition:.2f}"]
    for scope, counts in (("tenant", request.tenant_drafts), ("all", request.model_drafts)):
        tested = counts.accepted + counts.rejected
        if tested > 0:
            known.append(f"{counts.accepted:.0f} of {tested:.0f} draft tokens accepted ({scope})")
    return ", ".join(known)


def _plan(plan: SpeculationPlan) -> str:
    what = "no drafts" if plan.max_draft_tokens == 0 else f"up to {plan.max_draft_tokens}"
    by = "" if plan.proposer is None else f" by {plan.proposer}"
    return f"{plan.policy}: {what}{by}; {plan.reason}"


def _outcome(decision: Decision) -> list[str]:
    """Return the result of the plan and its revisions as lines, or nothing while it runs."""
    outcome = decision.outcome
    if outcome is None:
        return []
    if outcome.cost_usd is not None:
        return [f"cost: {outcome.cost_usd:.6f} USD"]
    result = (
        f"outcome: {outcome.accepted_tokens} of {outcome.drafted_tokens} draft tokens accepted "
        f"in {outcome.spec_steps} steps"
    )
    return [result, *(f"revised: {one.reason}" for one in outcome.revisions)]


def _difference(decisions: Iterable[Decision], policy: SpeculationPolicy) -> str:
    """Return how many decisions the policy would change."""
    pairs = [(decision.plan, decision.under(policy)) for decision in decisions]
    changed = sum(
        (old.proposer, old.max_draft_tokens) != (new.proposer, new.max_draft_tokens)
        for old, new in pairs
    )
    return f"{policy.name} would decide differently in {changed} of {len(pairs)} decisions"
