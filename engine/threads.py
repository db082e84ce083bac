"""CPU threads of the tensor library: how many, how they wait, and that they do not change results.

For entry points only: all of it holds for the whole process.
"""

import os
import sys
from pathlib import Path

SMALL_MODEL_BYTES = 512 << 20
"""The products of a smaller model are too short for threads to be worth their wake-ups."""

_ENVIRONMENT = {
    # Idle threads of a parallel region sleep instead of spinning. Spinning gains a little on an
    # idle machine; where cores are shared, with storage nodes for instance, the spinning threads
    # keep those they wait for from running: 23 tokens a second became 2.
    "OMP_WAIT_POLICY": "PASSIVE",
    # float32 matrix products sum in one order for any number of threads, at no cost that could be
    # measured. Without it, two processes with different numbers of threads differ in the last bits
    # of K and V. (Products in bfloat16 come from another library and do not depend on it.) Kept on
    # Intel's processors; on an AMD EPYC, products of less than 18 columns still differ, so engines
    # that share blocks are given the same number of threads there.
    "MKL_CBWR": "AUTO,STRICT",
}


def prepare_environment() -> None:
    """Set what the tensor library reads when it is loaded; values that are already set stay."""
    assert "torch" not in sys.modules, "the environment is read once, when torch is loaded"
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def find_environment_problem() -> str | None:
    """What is wrong with the environment for equal bits on any machine of one kind, in words."""
    wrong = [name for name in _ENVIRONMENT if name.startswith("MKL") and name not in os.environ]
    if not wrong:
        return None
    return (
        f"{', '.join(wrong)} is not set: cache bytes will depend on the number of CPU threads; "
        "engine.threads.prepare_environment() sets it, called before torch is imported"
    )


def set_thread_count(threads: int | None) -> None:
    """Use this many threads; None for one on each core this process may run on."""
    import torch

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))


def set_threads_for(model: Path, wanted: int | None) -> int:
    """Use as many threads as an engine worker has of this model, unless another number is wanted.
    Returns the number.

    What is measured for a worker has to run as the worker does.
    """
    threads = choose_threads(wanted, measure_model(model), len(os.sched_getaffinity(0)))
    set_thread_count(threads)
    return threads


def choose_threads(wanted: int | None, model_bytes: int, cores: int) -> int:
    """What was asked for; else one for a small model and one a core for others."""
    if wanted is not None:
        return wanted
    return 1 if model_bytes < SMALL_MODEL_BYTES else cores


def measure_model(path: Path) -> int:
    """Bytes of the model's files, 0 if there are none that can be looked at."""
    try:
        if path.is_dir():
            return sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return path.stat().st_size
    except OSError:
        return 0  # what is wrong with it is said when it is loaded
