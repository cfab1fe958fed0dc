"""The OpenAPI document, made from the structs, their limits and a table of operations."""
