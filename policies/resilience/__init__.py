"""What happens when something fails: breakers, retries, hung workers and failover."""
