"""Decisions about moves of running streams between workers that keep running."""
