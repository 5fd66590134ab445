"""Reproduce the paper's procedures: score a model with parts of it removed (arXiv 2504.18574)."""
