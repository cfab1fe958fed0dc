"""Speculation policies: whether and how far to speculate, per request and per step."""
