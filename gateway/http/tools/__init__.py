"""Function calls: how models write them, and how they are found in the text of an answer."""
