"""Train a hybrid, its control, or a base."""

from surgery.deprecated import callable_package

callable_package(__name__, "training", "train_model")
