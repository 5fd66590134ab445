"""What a run shows: figures and one HTML page."""
