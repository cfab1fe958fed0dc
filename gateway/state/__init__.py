"""What the nodes of a pool know of each other, behind one protocol."""
