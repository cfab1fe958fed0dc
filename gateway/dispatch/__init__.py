"""The path of a job, from its admission to its last delta.

`job` is what a client asked for. `admission` lets it in or says when to come back, `queue` holds it
until a worker has room, `placement` decides there how far it may speculate, `leases` reserves the
capacity, and `dispatcher` leads it through all of these.
"""
