"""The state that the nodes of a pool share: worker reports and leases, in memory or in Redis."""
