"""Stands in for the package: see the stand-in for causal_conv1d."""

__version__ = "2.2.0"
