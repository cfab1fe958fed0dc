"""Compares two runs, with confidence intervals, and reports regressions."""
