"""Decisions about which machines to deploy for a workload."""
