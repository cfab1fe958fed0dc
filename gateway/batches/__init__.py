"""Files of clients, and batches of requests that run while the workers have nothing else to do."""
