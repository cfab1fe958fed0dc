"""The cost of the HTTP edge in CPU time and latency, compared with minimal servers and rivals."""
