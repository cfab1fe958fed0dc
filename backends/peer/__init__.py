"""Workers of other Draftgate nodes, which take token ids over a WebSocket."""
