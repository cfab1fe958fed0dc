"""Compares two runs: what changed, with confidence intervals, and whether that is a regression."""
