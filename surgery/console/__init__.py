"""Print progress and tables in a terminal."""
