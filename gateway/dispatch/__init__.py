"""The path of a job from its admission to its last delta.

The module `job` defines a client's request. `admission` admits it or rejects it with a retry time.
Each of its prompts is a `prompt.Prompt`, which waits in the `queue` until a worker has capacity. A
`hold` is what the prompt then holds on this worker: `leases` reserves the capacity, and `placement`
decides how far the prompt may speculate. The `watchdog` detects the loss of a worker, after which
the prompt continues on another worker. `dispatcher` composes these modules.

`kv_fetch` copies KV blocks between workers for prompts that resume and for new prompts, and
`kv_replication` copies hot prefixes. Both use the transfers of `kv_pulls`.

`moves` moves running prompts to other workers. `rescheduling` chooses moves
between workers that keep running. `handover` moves a stream from the worker of its prompt to that
of its output. `overlap` runs a stream on both workers, and `splice` joins their tokens.

The folder `upstreams` uses the same admission and queue for requests that an upstream runs.
"""
