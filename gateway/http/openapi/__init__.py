"""The OpenAPI document: made of the structs on the wire, their limits and a table of operations."""
