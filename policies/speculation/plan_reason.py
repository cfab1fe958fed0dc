"""The cause of a speculation plan with its figures, and the sentence that both give.

A plan states its cause as an enum and the compared values as figures. `render_reason` turns them
into the sentence for the client, so that a sentence cannot contradict its figures.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct


class PlanCause(StrEnum):
    """The cause of a speculation plan."""

    REQUESTED_OFF = "requested_off"
    NO_PROPOSER = "no_proposer"
    MISSING_PROPOSER = "missing_proposer"
    SERVER_OFF = "server_off"
    PRICE_TOO_HIGH = "price_too_high"
    """No slot can be worth the price, so the plan is off."""
    DRAFTS_LOSE = "drafts_lose"
    """Drafts have cost the worker time, so it drafts nothing for a while."""
    PRICE = "price"
    """The slot after the cap is not worth the price."""
    LONGEST_DRAFT = "longest_draft"
    """Every slot of the longest draft may be worth the price."""
    CLIENT_CAP = "client_cap"
    FIXED_LENGTH = "fixed_length"
    BATCH_TABLE = "batch_table"
    BATCH_GOODPUT = "batch_goodput"
    LIKELIEST_SLOTS = "likeliest_slots"
    UPSTREAM_LENGTH = "upstream_length"
    """The client's cap is shorter than the drafts of the engine."""
    UPSTREAM_PAYS = "upstream_pays"
    UPSTREAM_DOES_NOT_PAY = "upstream_does_not_pay"
    CAPACITY = "capacity"
    """Only replicas of the other kind have capacity, or none has."""
    OTHER = "other"
    """A policy of a third party gives the reason in words."""


class AcceptanceSource(StrEnum):
    """The requests from which an acceptance is known."""

    WORKER = "worker"
    ALL_TENANTS = "all_tenants"
    TENANT = "tenant"


class PlanFigures(Struct, frozen=True, omit_defaults=True):
    """The values that a cause compares, where defaults are values that it does not use.

    Attributes:
        price: price of a draft slot in expected tokens.
        slot: number of the compared slot, from 1.
        survival: survival of this slot in a good draft (`draft_forecast`).
        weight: highest weight that the request's tokens may reach (`weights`).
        acceptance: probability of a draft token given all previous tokens.
        source: the requests from which the acceptance is known.
        temperature: sampling temperature.
        repetition: repetition of the prompt.
        running: number of running sequences on the worker.
        proposers: proposers that may draft, if several.
        wanted: the proposer that the client names.
        drafted, accepted: mean tokens per draft of an upstream engine.
        drafting_token_s, plain_token_s: seconds that a token costs all requests, with an engine
            that drafts and with a plain engine, or 0 if unknown.
        client_tokens: the client's cap.
        words: reason of a policy in words.
    """

    price: float | None = None
    slot: int = 0
    survival: float = 0.0
    weight: float = 1.0
    acceptance: float | None = None
    source: AcceptanceSource = AcceptanceSource.WORKER
    temperature: float = 0.0
    repetition: float | None = None
    running: int = 0
    proposers: tuple[str, ...] = ()
    wanted: str = ""
    drafted: float = 0.0
    accepted: float = 0.0
    drafting_token_s: float = 0.0
    plain_token_s: float = 0.0
    client_tokens: int = 0
    words: str = ""


NO_FIGURES: Final = PlanFigures()
"""The figures of a cause that compares nothing."""

LOSS_REASON: Final = "drafts have cost this worker more time than they saved"
"""Why drafts are stopped on a worker."""

_PHRASES: Final = {
    PlanCause.REQUESTED_OFF: "the request asked for no speculation",
    PlanCause.NO_PROPOSER: "the worker has no proposer",
    PlanCause.MISSING_PROPOSER: "the worker has no proposer {wanted!r}",
    PlanCause.SERVER_OFF: "speculation is off on this server",
    PlanCause.DRAFTS_LOSE: LOSS_REASON,
    PlanCause.FIXED_LENGTH: "fixed at {cap} draft tokens per step",
    PlanCause.BATCH_TABLE: "up to {cap} draft tokens, by a table of batch sizes",
    PlanCause.BATCH_GOODPUT: "up to {cap} draft tokens, the same for all by goodput",
    PlanCause.LIKELIEST_SLOTS: (
        "{cap} draft tokens, of which the likeliest of the batch are verified"
    ),
    PlanCause.UPSTREAM_LENGTH: (
        "the client asked for at most {client_tokens} draft tokens, and {drafted:.3g} are usual"
    ),
    PlanCause.CAPACITY: "{words}",
    PlanCause.OTHER: "{words}",
}

_SOURCES: Final = {
    AcceptanceSource.WORKER: "of this worker",
    AcceptanceSource.ALL_TENANTS: "of all tenants",
    AcceptanceSource.TENANT: "of this tenant",
}


def render_reason(cause: PlanCause, figures: PlanFigures, cap: int) -> str:
    """Return the reason of a plan in words.

    Args:
        cap: maximum number of draft tokens of the plan.
    """
    if cause is PlanCause.BATCH_TABLE and not cap:
        return "the table of batch sizes drafts nothing"
    if cause in {PlanCause.UPSTREAM_PAYS, PlanCause.UPSTREAM_DOES_NOT_PAY}:
        return _upstream_reason(cause, figures)
    if cause in _PHRASES:
        return _PHRASES[cause].format(
            cap=cap,
            wanted=figures.wanted,
            client_tokens=figures.client_tokens,
            drafted=figures.drafted,
            words=figures.words,
        )
    reason = f"{_length(cap)}{_comparison(cause, figures)}; {_evidence(figures)}"
    if figures.proposers and cap:
        reason += f"; by {', '.join(figures.proposers)}, whichever pays most"
    return reason


def compare(left: float, right: float) -> tuple[str, str, str]:
    """Return two values as text with as many digits as tell them apart, and the sign between them.

    The sign is one of `<`, `=` and `>`.
    """
    if left == right:
        text = f"{left:.3g}"
        return text, "=", text
    digits = 3
    while float(f"{left:.{digits}g}") == float(f"{right:.{digits}g}"):
        digits += 1
    return f"{left:.{digits}g}", "<" if left < right else ">", f"{right:.{digits}g}"


def _length(cap: int) -> str:
    if not cap:
        return "no draft tokens"
    return f"up to {cap} draft token{'s' if cap > 1 else ''}"


def _comparison(cause: PlanCause, figures: PlanFigures) -> str:
    """Return the comparison that decides the cap, as the end of a clause."""
    if cause is PlanCause.CLIENT_CAP:
        return ", as asked for"
    price = figures.price or 0.0
    if cause is PlanCause.PRICE_TOO_HIGH:
        price_text, sign, most = compare(price, figures.weight)
        return f": price {price_text} {sign} {most}, the most that a draft slot can be worth"
    if not price and figures.survival:
        return ": slots are free at present"
    worth, times = figures.weight * figures.survival, ""
    price_text, sign, worth_text = compare(price, worth)
    if figures.weight != 1.0:
        times = f"{worth_text} = {figures.weight:g} x "
        worth_text = f"{figures.survival:.3g}"
    # The policy still allows one slot, because its draft may be better than a good draft.
    hope = ", but a better draft may be worth it" if figures.slot == 1 else ""
    survival = f"{times}survival {worth_text} at slot {figures.slot} of a good draft"
    return f": price {price_text} {sign} {survival}{hope}"


def _evidence(figures: PlanFigures) -> str:
    """Return the basis of the forecast in words."""
    words = f"acceptance {figures.acceptance or 0.0:.2f} {_SOURCES[figures.source]}"
    words += f" at temperature {figures.temperature:g}"
    if figures.repetition is not None:
        words += f", repetition {figures.repetition:.2f}"
    return f"{words}, {figures.running} running"


def _upstream_reason(cause: PlanCause, figures: PlanFigures) -> str:
    """Return whether the drafts of an upstream engine pay, and the compared values."""
    pays = "drafts pay" if cause is PlanCause.UPSTREAM_PAYS else "drafts do not pay"
    reason = (
        f"{pays}: {figures.accepted:.2f} of {figures.drafted:.3g} draft tokens accepted, "
        f"price {figures.price or 0.0:.3g}, {figures.running} running"
    )
    if not figures.drafting_token_s or not figures.plain_token_s:
        return reason
    with_ms, _, without_ms = compare(figures.drafting_token_s * 1e3, figures.plain_token_s * 1e3)
    return f"{reason}; a token costs {with_ms} ms in all with drafts, {without_ms} ms without"
