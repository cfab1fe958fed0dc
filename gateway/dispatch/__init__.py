"""The path of a job from its admission to its last delta.

The module `job` defines a client's request. `admission` admits it or rejects it with a retry time.
`failover` runs each of its prompts. The `queue` holds a prompt until a worker has capacity, and
`leases` reserves that capacity. `placement` decides how far the prompt may speculate, and an
`attempt` runs it. The `watchdog` detects the loss of a worker, after which another attempt
continues. `dispatcher` composes these modules.

The folder `kv` copies KV blocks between workers, and `moves` moves running prompts to other
workers. `upstreams` uses the same admission and queue for requests that an upstream runs.
"""
