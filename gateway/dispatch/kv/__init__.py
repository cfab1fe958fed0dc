"""Copies of KV blocks between workers: for prompts that resume, new prompts and hot prefixes."""
