"""A Ray cluster of several local nodes in its own process.

    python ray_cluster.py

The program prints the address of the cluster and then executes each line on stdin. The line `remove
HOST` kills the node at that address, and `add HOST` adds a node. The cluster stops at the end of
stdin. The head has no cores, so every worker runs on another node than the launcher.
"""

from __future__ import annotations

import os
import sys
from typing import Any

CPUS = 2
"""Number of cores of each node, which limits its workers."""


def main() -> None:
    from ray.cluster_utils import Cluster

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # separates Ray's output from the replies
    cluster = Cluster()
    cluster.add_node(num_cpus=0, include_dashboard=False)
    nodes: dict[str, Any] = {}
    out.write(f"{cluster.address}\n")
    for line in sys.stdin:
        what, host = line.split()
        if what == "add":
            nodes[host] = cluster.add_node(num_cpus=CPUS, node_ip_address=host)
        else:
            cluster.remove_node(nodes.pop(host), allow_graceful=False)
        out.write(f"{what} {host}\n")
    cluster.shutdown()


if __name__ == "__main__":
    main()
