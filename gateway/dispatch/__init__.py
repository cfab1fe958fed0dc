"""The path of a job, from its admission to its last delta.

`job` is what a client asked for. `admission` lets it in or says when to come back. Each prompt is
led by `failover`: `queue` holds it until a worker has room, `placement` decides there how far it
may speculate, `leases` reserves the capacity, and an `attempt` runs it; if that loses its worker,
as the `watchdog` may find, another one goes on. `dispatcher` puts all of these together.
"""
