"""CPU time and latency of the HTTP edge, compared with minimal servers and other gateways."""
