"""The shipped demo models and how they were trained."""
