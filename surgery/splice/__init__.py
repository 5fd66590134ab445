"""Plan which heads become attention, and splice them."""
