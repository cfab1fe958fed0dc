"""Function calls: how models write them, found in their text, and forced."""
