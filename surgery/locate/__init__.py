"""Measure what each head does for retrieval, and choose heads."""
