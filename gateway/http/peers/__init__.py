"""The server side of links between nodes: other nodes use this node's workers."""
