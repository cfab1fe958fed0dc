"""The state that the nodes of a pool share: reports of workers, and leases."""
