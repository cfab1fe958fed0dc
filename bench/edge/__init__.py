"""What the edge costs: CPU, added latency and time to first token, beside floors and rivals."""
