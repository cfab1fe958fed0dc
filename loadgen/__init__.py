"""Load generator: sends requests to a server over HTTP, checks every stream, and reports."""
