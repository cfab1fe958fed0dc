"""Requests: decoded, validated, and made into jobs."""
