"""The state store in Redis: scripts that run in the server (`lua/`), and their client."""
