"""Measurements of the edge."""
