"""Decisions about flows: several requests of one user action that share a deadline."""
