"""A request that waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that waits, as far as its order depends on it.

    Attributes:
        key: names it; unique, ascending with arrival.
        arrived_s: when it came.
        deadline_s: by when it should start.
        priority: its class; lower ones come first (as vLLM counts).
        tenant: whose it is.
        share: its tenant's weight among tenants, more than 0.
        work_s: seconds of the whole pool that it takes, by which it delays all behind it; 0 where
            nobody knows.
        returning: it had its turn once, and its worker broke (`returning`).
    """

    key: int
    arrived_s: float
    deadline_s: float
    priority: int = 0
    tenant: str = ""
    share: float = 1.0
    work_s: float = 0.0
    returning: bool = False
