"""Stores in dictionaries, whose calls never suspend."""
