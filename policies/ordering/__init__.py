"""Ordering policies: who of those that wait is next."""

from policies.ordering.fair import Fair
from policies.ordering.single import edf, fcfs
from policies.ordering.ticket import Ticket

__all__ = ["Fair", "Ticket", "edf", "fcfs"]
