"""Membership of a pool: discovery of other nodes' workers, heartbeats, addresses, access."""
