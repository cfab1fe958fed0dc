"""A node among others: what it tells of its workers, who may use them, and whom it finds."""
