"""Plan which heads become attention, and build the hybrid."""

from surgery.deprecated import callable_package

callable_package(__name__, "graft", "splice_model")
