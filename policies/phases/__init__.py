"""Decisions about where the prompt of a request is computed and where its output."""
