"""What other load generators say of a server whose truth is known, beside what ours says."""
