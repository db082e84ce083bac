"""Python's collector of reference cycles, kept from looking at a loaded model again and again.

A full collection visits every object of the process: with the tensor library and a model loaded it
holds a pass up by some 45 ms, and in a pass of some thousand operations one comes about every other
time (H200, `python -m benchmarks.gpu_overlap --lengths 32768`: 131 ms with, 87 ms without).
"""

import gc


def freeze_loaded_objects() -> None:
    """What lives now is left out of every later collection; what comes later is collected as
    before. For a process that has loaded what it keeps to its end, and once."""
    gc.collect()
    gc.freeze()
