"""What every test needs before torch and transformers are imported: one thread if not set, no network, no noise."""

import gc
import os

gc.disable()  # until all tests are collected: imports make millions of objects, and hardly any garbage

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import pytest
import torch
from transformers.utils import logging

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
logging.disable_progress_bar()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of training before other unit tests: at the end, one worker waits for a long file of the other."""
    items.sort(key=lambda item: not {"integration", "train"} & set(item.path.parts))


def pytest_collection_finish() -> None:
    """Leave what imports and collection have made out of later garbage collections.

    Each training ends with a full one, which would otherwise visit millions of objects of libraries for half a second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
