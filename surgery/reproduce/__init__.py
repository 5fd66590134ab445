"""Reproduce the procedures of the Gather-and-Aggregate paper (arXiv 2504.18574): score a model with parts removed."""
