"""Change a running model: hooks, ablation, oracle reads, scaled heads."""
