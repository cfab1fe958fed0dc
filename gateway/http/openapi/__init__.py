"""The OpenAPI document, generated from the structs, their limits and a table of operations."""
