"""Which of the waiting requests is next."""
