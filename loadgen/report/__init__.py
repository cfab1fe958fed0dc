"""Reports of a run for people: a live view, tables and a page."""
