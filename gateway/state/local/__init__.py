"""The memory store of a process, which other processes reach over a Unix socket."""
