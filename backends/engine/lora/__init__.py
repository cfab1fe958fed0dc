"""LoRA adapters: low-rank additions to the products of a model, chosen by each request."""
