"""Export hybrids, verify exports, publish them."""

from surgery.deprecated import callable_package

callable_package(__name__, "folder", "export_model")
