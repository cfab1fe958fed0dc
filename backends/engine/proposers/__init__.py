"""Proposers: what drafts."""
