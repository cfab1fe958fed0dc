"""Finds the highest rate at which enough requests meet their SLO, with a confidence interval."""
