"""Ordering policies, which choose the next waiting request."""
