"""The path of a job from its admission to its last delta.

`job` is a client's request. `admission` admits it or says when to retry. `failover` runs each of
its prompts: the `queue` holds it until a worker has capacity, `leases` reserves that capacity,
`placement` decides how far it may speculate, and an `attempt` runs it. If the attempt loses its
worker, which the `watchdog` may detect, another attempt continues. `dispatcher` composes these.

`forwarding` uses the same admission and queue for requests that an upstream answers.
"""
