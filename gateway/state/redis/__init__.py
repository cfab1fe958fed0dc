"""The state store in Redis, with Lua scripts that run on the server and their client."""
