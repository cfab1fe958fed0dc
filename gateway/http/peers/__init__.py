"""The server side of links between nodes, over which other nodes use this node's workers."""
