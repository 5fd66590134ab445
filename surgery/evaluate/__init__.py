"""Evaluate models on the same prompts: accuracy, paired tests, speed and memory, lm-eval."""

from surgery.deprecated import callable_package

callable_package(__name__, "evaluation", "evaluate_model")
