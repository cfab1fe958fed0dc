"""Admission control: which requests may wait, and when refused requests should return."""
