"""The fixtures of the integration tests."""

from tests.integration.conftest import browser, finished, quick_commands, shared

__all__ = ["browser", "finished", "quick_commands", "shared"]
