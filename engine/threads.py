"""How many CPU threads the tensor library uses, and how they wait for each other.

For entry points only: both are settings of the whole process.
"""

import os
import sys


def set_waiting_policy() -> None:
    """Let idle threads of a parallel region sleep instead of spinning. Call before torch is loaded.

    Spinning gains a little on an idle machine, but on one whose cores are shared, with storage
    nodes for instance, the spinning threads keep those they wait for from running: 23 tokens a
    second became 2. A policy that is already in the environment stays.
    """
    assert "torch" not in sys.modules, "the policy is read once, when torch loads its threads"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def set_thread_count(threads: int | None) -> None:
    """Use this many threads; None for one on each core this process may run on."""
    import torch

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
