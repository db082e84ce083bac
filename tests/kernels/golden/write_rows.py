"""Writes rope, streams, experts and engram .npz: a part of the golden vectors of these operations,
for where the folder is not.

Run: python -m tests.kernels.golden.write_rows GOLDEN_FOLDER
"""

import sys
from pathlib import Path

import numpy as np

from tests.kernels.golden_rows import CUTS, Arrays

APPLY_ROWS = 5
APPLY_CHANNELS = 32
MIX_ROWS = 4
ROUTED_ROWS = 8
NGRAM_TOKENS = 56
"""Up to a few behind the first masked ones."""
NGRAM_ROWS = 10
GATE_ROWS = [0, 3, 9]
"""A plain one, one with u = 0, a masked one."""


def keep_rope(arrays: Arrays) -> Arrays:
    kept = dict(arrays)
    kept["apply_positions"] = arrays["apply_positions"][:APPLY_ROWS]
    for name in ("apply_x", "apply_y"):
        kept[name] = arrays[name][:APPLY_ROWS, :, -APPLY_CHANNELS:]
    return kept


def keep_streams(arrays: Arrays) -> Arrays:
    """Not the projection of a site: its matrix is most of the bytes."""
    whole = ("scale", "base", "iters")
    return {
        name: array if name.endswith(whole) else array[:MIX_ROWS]
        for name, array in arrays.items()
        if name != "site_fn"
    }


def keep_experts(arrays: Arrays) -> Arrays:
    """Of the routed rows some of images and some not; not the expert, most of the bytes."""
    kept = {}
    for case in ("gate384", "gate9", "gate_top1"):
        rows = _some_of_both(arrays[f"{case}_image_mask"])
        for name in ("bias", "bias_vl"):
            kept[f"{case}_{name}"] = arrays[f"{case}_{name}"]
        for name in ("logits", "image_mask", "out_experts", "out_weights", "gap"):
            kept[f"{case}_{name}"] = arrays[f"{case}_{name}"][rows]
    return kept


def _some_of_both(is_image: np.ndarray) -> np.ndarray:
    half = ROUTED_ROWS // 2
    some = [np.flatnonzero(is_image)[:half], np.flatnonzero(~is_image)[:half]]
    return np.sort(np.concatenate(some))


def keep_engram(arrays: Arrays) -> Arrays:
    """Of the first tokens all ids; rows of the first few, and masked ones of the last few."""
    kept = {}
    for name, array in arrays.items():
        if name.startswith("gate_") and not name.endswith("_weight"):
            kept[name] = array[GATE_ROWS]
        elif name in ("real_compressed_ids", "real_live_mask", "real_rows_masked"):
            kept[name] = array[:NGRAM_TOKENS]
        else:
            kept[name] = array
    kept["real_rows"] = kept["real_rows"][:NGRAM_ROWS]
    kept["real_rows_masked"] = kept["real_rows_masked"][-NGRAM_ROWS:]
    return kept


KEEP = {
    "rope": keep_rope,
    "streams": keep_streams,
    "experts": keep_experts,
    "engram": keep_engram,
}


def main(folder: Path) -> None:
    for name, cut in CUTS.items():
        path = Path(__file__).parent / f"{name}.npz"
        np.savez_compressed(path, **KEEP[name](cut(folder)))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
