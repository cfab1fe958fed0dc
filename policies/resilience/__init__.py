"""Policies for failures: circuit breakers, retries, hung workers and failover."""
