"""The path of a job from its admission to its last delta.

The module `job` defines a client's request. `admission` admits it or rejects it with a retry time.
`failover` runs each of its prompts. The `queue` holds a prompt until a worker has capacity, and
`leases` reserves that capacity. `placement` decides how far the prompt may speculate, and an
`attempt` runs it. The `watchdog` detects the loss of a worker, after which another attempt
continues. `dispatcher` composes these modules.

`kv_fetch` copies KV blocks between workers for prompts that resume and for new prompts, and
`kv_replication` copies hot prefixes. Both use the transfers of `kv_pulls`.

`moves` moves running prompts (`stream.Stream`) to other workers. `rescheduling` chooses moves
between workers that keep running. `handover` moves a stream from the worker of its prompt to that
of its output. `overlap` runs a stream on both workers, and `splice` joins their tokens.

The folder `upstreams` uses the same admission and queue for requests that an upstream runs.
"""
