"""Train a hybrid, its control, or a base."""
