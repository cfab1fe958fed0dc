"""Two runs of load against each other: which figures changed, and how surely. Pure."""
