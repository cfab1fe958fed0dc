"""Gateways in front of real servers: models, fallbacks, failures, prefixes and speculation."""
