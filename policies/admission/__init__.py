"""Admission policies: who may wait, and when those may come back who may not."""

from draftgate.policies.admission.bounded import Bounded, Unbounded
from draftgate.policies.admission.deadline import Deadline
from draftgate.policies.admission.types import (
    AdmissionView,
    Admitted,
    PoolView,
    QueueView,
    RefusalKind,
    Refused,
)
from draftgate.policies.admission.wait_forecast import pool_of

__all__ = [
    "AdmissionView",
    "Admitted",
    "Bounded",
    "Deadline",
    "PoolView",
    "QueueView",
    "RefusalKind",
    "Refused",
    "Unbounded",
    "pool_of",
]
