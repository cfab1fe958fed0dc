"""Several processes of one node, which share a port, its workers and its stores.

    parent ──pipes──> worker process: serve, on a port of its own that only the fronts use
       │  ──pipes──> front: serve --no-worker, on a listener that the parent opened
       └──Unix socket: stores that all processes share, unless the node joins a pool in Redis

Each process is a node of a cluster, so the fronts find workers, lease their capacity and continue
lost streams as in any cluster. The parent only starts the processes and holds the stores.
"""
