"""Plan which heads become attention, and splice them."""

from surgery.deprecated import callable_package

callable_package(__name__, "graft", "splice_model")
