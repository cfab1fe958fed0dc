"""What a node tells of itself: metrics, logs, traces."""
