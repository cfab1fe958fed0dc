"""Workers of other Draftgate nodes, which receive token ids over one connection."""
