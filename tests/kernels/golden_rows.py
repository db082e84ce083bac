"""The golden vectors of RoPE, streams, experts and Engram.

Each function takes the folder of golden vectors and gives arrays by name. `golden/write_rows.py`
keeps a part of them in the project.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


def cut_rope(folder: Path) -> Arrays:
    arrays = dict(np.load(folder / "units" / "rope.npz"))
    rows = len(arrays["apply_x"])
    arrays["apply_positions"] = np.arange(rows) + int(arrays.pop("apply_start")[0])
    return arrays


def cut_streams(folder: Path) -> Arrays:
    return dict(np.load(folder / "units" / "mhc.npz"))


def cut_experts(folder: Path) -> Arrays:
    """The router's product is left to NumPy: what is checked is what follows it."""
    arrays = dict(np.load(folder / "units" / "moe.npz"))
    for case in ("gate384", "gate9", "gate_top1"):
        x, weight = arrays.pop(f"{case}_x"), arrays.pop(f"{case}_weight")
        arrays[f"{case}_logits"] = (x.astype(np.float64) @ weight.T).astype(np.float32)
    return arrays


def cut_engram(folder: Path) -> Arrays:
    return dict(np.load(folder / "units" / "engram.npz"))


CUTS: dict[str, Callable[[Path], Arrays]] = {
    "rope": cut_rope,
    "streams": cut_streams,
    "experts": cut_experts,
    "engram": cut_engram,
}
