"""Writes compressor, pool, index, listed_attention and layer_attention .npz: a part of the golden
vectors of these operations, for where the folder is not.

Run: python -m tests.kernels.golden.write_attention GOLDEN_FOLDER
"""

import sys
from pathlib import Path

import numpy as np

from tests.kernels.golden_attention import CUTS, Arrays

POOL_ROWS = {"a": 9, "b": 4, "c": 11, "d": 5}
"""Of each case every so-manieth row, from the last one back."""
INDEX_LAYERS = ("L1_", "L6_")
ATTENTION_LAYERS = ("positions", "L0_", "L6_")
LISTED_ROWS = [0, 1, 2, 4]
LISTED_HEADS = 2


def keep_pool(arrays: Arrays) -> Arrays:
    kept = dict(arrays)
    for case, step in POOL_ROWS.items():
        for name in ("logits", "mask", "visible"):
            kept[f"{case}_{name}"] = arrays[f"{case}_{name}"][::-1][::step]
    return kept


def keep_listed(arrays: Arrays) -> Arrays:
    """A few queries and two heads, with the rows that they list and no others."""
    listed = arrays["idx"][LISTED_ROWS]
    rows, places = np.unique(listed, return_inverse=True)
    assert rows[0] == -1
    return {
        "q": arrays["q"][LISTED_ROWS, :LISTED_HEADS],
        "kv": arrays["kv"][rows[1:]],
        "sink": arrays["sink"][:LISTED_HEADS],
        "idx": places.reshape(listed.shape) - 1,
        "out": arrays["out"][LISTED_ROWS, :LISTED_HEADS],
    }


def keep(name: str, arrays: Arrays) -> Arrays:
    if name == "pool":
        return keep_pool(arrays)
    if name == "listed_attention":
        return keep_listed(arrays)
    prefixes = {"index": INDEX_LAYERS, "layer_attention": ATTENTION_LAYERS}.get(name, ("",))
    return {key: array for key, array in arrays.items() if key.startswith(prefixes)}


def main(folder: Path) -> None:
    for name, cut in CUTS.items():
        path = Path(__file__).parent / f"{name}.npz"
        np.savez_compressed(path, **keep(name, cut(folder)))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
