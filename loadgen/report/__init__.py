"""What a run looks like to a person: live, as a table, as a page."""
