"""Which requests may wait, and when refused ones should return."""
