"""The shipped demo models."""
