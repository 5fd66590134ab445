"""Run the GPU bench: `make gpu`, `python -m bench.gpu`, or `python PATH/bench/gpu` from any folder."""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
# Set before torch and transformers are imported. Kernels come from installed packages, not from the Hub. Triton caches
# its tuning for the next process.
ENVIRONMENT = {
    "USE_HUB_KERNELS": "NO",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRITON_CACHE_AUTOTUNING": "1",
    "PYTHONWARNINGS": "ignore",
}

if __name__ == "__main__":
    for variable, setting in ENVIRONMENT.items():
        os.environ.setdefault(variable, setting)
    # Python puts this folder on the path when it is run by its path: its modules would hide libraries of the same name.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))

    from bench.gpu.command import main

    sys.exit(main())
