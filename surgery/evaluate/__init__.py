"""Measure models side by side: prompts, arms, contrasts, efficiency, lm-eval."""

from surgery.deprecated import callable_package

callable_package(__name__, "evaluation", "evaluate_model")
