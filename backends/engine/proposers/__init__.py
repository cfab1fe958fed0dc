"""Proposers, which draft tokens for verification."""
