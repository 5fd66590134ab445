"""Score answers: by rank among choices, and by generation."""
