"""Transfer of KV blocks between workers, by the hashes of their prefix caches."""
