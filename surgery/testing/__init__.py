"""Tiny models of every family, and models with planted retrieval heads, for tests and benchmarks."""
