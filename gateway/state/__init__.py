"""The state that the nodes of a pool share, which is worker reports and leases."""
