"""Run mamba_ssm's Triton kernels on a CPU, in Triton's interpreter. Imported before anything imports triton."""

import os
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")  # the compiled extension of Mamba-1

import torch
from triton.runtime import autotuner

OF_THE_DEVICE = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # the interpreter takes none of these


def _run_largest(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Instead of `Autotuner.run`, which measures: run the config with the largest blocks, the fewest programs."""
    config = max(self.configs, key=lambda c: min(c.kwargs.values(), default=1))
    self.best_config = config  # mamba_ssm reads the size of a block from it
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    if config.pre_hook:
        config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
    chosen = {key: value for key, value in config.all_kwargs().items() if key not in OF_THE_DEVICE}
    return self.fn.run(*args, **kwargs, **chosen)


autotuner.Autotuner.run = _run_largest
torch.cuda.device = lambda *_: nullcontext()  # type: ignore[assignment,misc]
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=1)
