"""Load generator: sends load to a server over HTTP, checks every stream, and reports."""
