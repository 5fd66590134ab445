"""Figures and HTML pages of a run."""
