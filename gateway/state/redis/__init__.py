"""The state store in Redis: Lua scripts that run on the server, and their client."""
