"""Benchmarks and studies, with their results. They run from a checkout and are not packaged."""
