"""Seeded tasks with answers and gold positions. Importing the package registers the built-in probes, without torch."""

from importlib import import_module

# The order is fixed, because lm-eval groups list their tasks in it.
_MODULES = (
    "kv_retrieval", "phonebook", "json_kv", "mqar", "hops", "copying", "needle", "knowledge", "sentences", "records",
    "pretraining",
)  # fmt: skip
for _module in _MODULES:
    import_module(f"surgery.probes.{_module}")
