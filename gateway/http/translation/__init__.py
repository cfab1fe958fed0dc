"""Requests of other APIs as chats, for upstreams that have only chats."""
