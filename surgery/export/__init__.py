"""Export hybrids, verify exports, and publish them on the Hub."""

from surgery.deprecated import callable_package

callable_package(__name__, "folder", "export_model")
