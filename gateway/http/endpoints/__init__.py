"""The handlers of the endpoints."""
