"""Measure what each head does for retrieval, and choose heads."""

from surgery.deprecated import callable_package

callable_package(__name__, "locating", "locate_heads")
