"""What other nodes are told and may ask for: this side of `backends.peer`."""
