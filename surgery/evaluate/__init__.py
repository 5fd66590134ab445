"""Evaluate models on the same prompts: accuracy, paired tests, speed and memory, lm-eval."""
