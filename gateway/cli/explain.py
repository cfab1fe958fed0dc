"""`draftgate explain`: recorded decisions, and what another policy would have decided."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import typer

from gateway.decisions import Decision, read_decisions
from policies.protocols import SpeculationPolicy
from policies.registry import speculation_policy
from policies.types import SpeculationPlan

FAILED = 1


def run_explain(path: Path, policy: str | None, request_id: str | None, *, as_json: bool) -> None:
    """Print the decisions of a file; exits with 1 and one line on an error."""
    try:
        other = None if policy is None else speculation_policy(policy)
        chosen = [d for d in read_decisions(path) if request_id in {None, d.request_id}]
    except (OSError, ValueError) as error:
        typer.echo(f"draftgate: {error}", err=True)
        sys.exit(FAILED)
    if not chosen:
        typer.echo("draftgate: there is no such decision", err=True)
        sys.exit(FAILED)
    for decision in chosen:
        replayed = None if other is None else decision.under(other)
        typer.echo(_as_json(decision, replayed) if as_json else _as_text(decision, replayed))
    if other is not None and not as_json:
        typer.echo(_difference(chosen, other))


def _as_json(decision: Decision, replayed: SpeculationPlan | None) -> str:
    return msgspec.json.encode({"decision": decision, "replayed": replayed}).decode()


def _as_text(decision: Decision, replayed: SpeculationPlan | None) -> str:
    request, load = decision.request, decision.load
    asked = (
        f"{request.prompt_tokens} prompt tokens, up to {request.max_tokens} new, temperature "
        f"{request.temperature:g}, asked for {request.mode.value}"
    )
    there = (
        f"{load.running} running, {load.waiting} waiting, price {load.price:.3f}, "
        f"acceptance {load.acceptance:.2f}"
    )
    plans = [decision.plan] if replayed is None else [decision.plan, replayed]
    lines = [f"{decision.request_id} on {decision.worker_id}", f"{asked}; {there}"]
    return "\n  ".join([*lines, *map(_plan, plans)])


def _plan(plan: SpeculationPlan) -> str:
    what = "no drafts" if plan.max_draft_tokens == 0 else f"up to {plan.max_draft_tokens}"
    by = "" if plan.proposer is None else f" by {plan.proposer}"
    return f"{plan.policy}: {what}{by}; {plan.reason}"


def _difference(decisions: Iterable[Decision], policy: SpeculationPolicy) -> str:
    """Return how many decisions the policy would have made otherwise."""
    pairs = [(decision.plan, decision.under(policy)) for decision in decisions]
    other = sum(
        (old.proposer, old.max_draft_tokens) != (new.proposer, new.max_draft_tokens)
        for old, new in pairs
    )
    return f"{policy.name} decides otherwise in {other} of {len(pairs)}"
