"""EAGLE-3 heads: a layer that drafts from hidden states of its target."""
