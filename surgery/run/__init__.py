"""Run a recipe in a folder: stages, order, resume."""
