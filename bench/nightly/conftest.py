"""The fixtures of the integration tests."""

from tests.integration.conftest import browser, finished, forked_reloads, new_process

__all__ = ["browser", "finished", "forked_reloads", "new_process"]
