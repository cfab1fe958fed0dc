"""A Ray cluster of several nodes on this machine, in a process of its own.

    python ray_cluster.py

prints the cluster's address; then, for each line on stdin, an answer: `remove HOST` kills the node
at that address without a word, `add HOST` adds one; the end of stdin ends the cluster. The head has
no cores, so that every worker runs on another node than the launcher's.
"""

from __future__ import annotations

import os
import sys
from typing import Any

CPUS = 2
"""Of each node: so many workers fit there."""


def main() -> None:
    from ray.cluster_utils import Cluster

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no answer
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
