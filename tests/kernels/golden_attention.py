"""The golden vectors of compression, index scores, selection and attention.

Each function takes the folder of golden vectors and gives arrays by name, cut so that an operation
can be called with them. `golden/write_attention.py` keeps a part of them in the project.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
SEQUENCE = "n33"
WINDOW = 16
TOPK = 16
OWNERS = {1: 1, 3: 3, 4: 4, 6: 4}
"""Of each index source layer of the golden model the layer whose entries it scores."""
LISTS = {1: 1, 2: 1, 3: 3, 4: 4, 5: 4, 6: 6, 7: 6}
"""Of each layer with entries the layer whose list of entries it uses."""
RATIOS = {1: 2, 3: 2, 4: 1}


def cut_compressor(folder: Path) -> Arrays:
    units = np.load(folder / "units" / "selection.npz")
    arrays = {}
    for ratio in (2, 4):
        for name in ("score", "content"):
            whole = units[f"comp_r{ratio}_{name}"]
            groups = len(whole) // ratio
            arrays[f"r{ratio}_{name}"] = whole[: groups * ratio].reshape(groups, ratio, -1)
        arrays[f"r{ratio}_out"] = units[f"comp_r{ratio}_out_bf16"]
    return arrays


def cut_pool(folder: Path) -> Arrays:
    """`<case>_logits`, `_mask`, `_par`, and the lists of entries `compact_*`, `restore_*`."""
    units = np.load(folder / "units" / "selection.npz")
    arrays = {}
    for case in "abcd":
        for name in ("logits", "mask", "par"):
            arrays[f"{case}_{name}"] = units[f"cand_{case}_{name}"]
        block_entries, blocks, ratio = arrays[f"{case}_par"].tolist()
        rows = len(arrays[f"{case}_logits"])
        arrays[f"{case}_visible"] = (np.arange(rows) + 1) // ratio
        arrays[f"{case}_par"] = np.array([block_entries, blocks])
    names = ("compact_blocks", "compact_valid", "compact_lens", "restore_in", "restore_out")
    return arrays | {name: units[name] for name in names}


def cut_index(folder: Path) -> Arrays:
    """Of each index source layer l: `L<l>_q`, `_weights`, `_keys`, `_visible`, `_scores`, `_topk`
    and `_gap`, how far the last chosen is above the best of the rest."""
    inner = np.load(folder / "v41" / "internals.npz")
    sequences = np.load(folder / "v41" / "sequences.npz")
    positions = inner[f"pos_{SEQUENCE}"].astype(np.int64)
    arrays = {}
    for layer, owner in OWNERS.items():
        of = f"{SEQUENCE}_L{layer}"
        arrays[f"L{layer}_q"] = inner[f"iq_post_{of}"]
        arrays[f"L{layer}_weights"] = inner[f"iw_{of}"]
        arrays[f"L{layer}_keys"] = inner[f"ik_post_{SEQUENCE}_L{owner}"]
        arrays[f"L{layer}_visible"] = (positions + 1) // RATIOS[owner]
        arrays[f"L{layer}_scores"] = inner[f"iscore_{of}"]
        arrays[f"L{layer}_topk"] = sequences[f"topk_{of}"][positions]
        arrays[f"L{layer}_gap"] = sequences[f"topk_gap_{of}"][positions]
    return arrays


def cut_listed_attention(folder: Path) -> Arrays:
    units = np.load(folder / "units" / "selection.npz")
    return {name: units[f"attn_{name}"] for name in ("q", "kv", "sink", "idx", "out")}


def cut_layer_attention(folder: Path) -> Arrays:
    """Of each layer l of the golden model: `L<l>_q`, `_window`, `_sink`, `_out`; and with entries
    `_entries`, `_selected`; `positions` of the queries."""
    inner = np.load(folder / "v41" / "internals.npz")
    sequences = np.load(folder / "v41" / "sequences.npz")
    positions = inner[f"pos_{SEQUENCE}"].astype(np.int64)
    arrays = {"positions": positions}
    for layer in range(len(inner[f"q_{SEQUENCE}"])):
        arrays[f"L{layer}_q"] = inner[f"q_{SEQUENCE}"][layer]
        arrays[f"L{layer}_out"] = inner[f"attn_o_{SEQUENCE}"][layer]
        arrays[f"L{layer}_window"] = inner[f"swa_post_{SEQUENCE}"][layer]
        arrays[f"L{layer}_sink"] = _read_sink(folder, layer)
        if layer in LISTS:
            owner = OWNERS[LISTS[layer]]
            arrays[f"L{layer}_entries"] = inner[f"ckv_post_{SEQUENCE}_L{owner}"]
            selected = sequences[f"topk_{SEQUENCE}_L{LISTS[layer]}"]
            arrays[f"L{layer}_selected"] = selected[positions]
    return arrays


def _read_sink(folder: Path, layer: int) -> np.ndarray:
    """float32 [H] out of a safetensors file: length of the header, header, bytes."""
    with (folder / "v41" / "model.safetensors").open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        entry = header[f"layers.{layer}.attn.attn_sink"]
        assert entry["dtype"] == "F32"
        first, end = entry["data_offsets"]
        file.seek(8 + header_bytes + first)
        return np.frombuffer(file.read(end - first), dtype=np.float32)


CUTS: dict[str, Callable[[Path], Arrays]] = {
    "compressor": cut_compressor,
    "pool": cut_pool,
    "index": cut_index,
    "listed_attention": cut_listed_attention,
    "layer_attention": cut_layer_attention,
}
