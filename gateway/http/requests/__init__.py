"""What clients send: decoded, checked, and turned into jobs."""
