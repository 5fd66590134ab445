"""Plan which heads become attention, and build the hybrid."""
