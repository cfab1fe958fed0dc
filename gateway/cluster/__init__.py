"""Membership of a pool, with discovery, heartbeats, addresses and access control."""
