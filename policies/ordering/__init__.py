"""Ordering policies: who of those that wait is next."""

from draftgate.policies.ordering.fair import Fair
from draftgate.policies.ordering.single import edf, fcfs
from draftgate.policies.ordering.ticket import Ticket

__all__ = ["Fair", "Ticket", "edf", "fcfs"]
