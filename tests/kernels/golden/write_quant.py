"""Writes quant.json: a part of the golden vectors of quantised formats, for where they are not.

Takes the first channels of the rows that test an edge, and of a few plain ones. Floats and codes
are hexadecimal bytes, little-endian. Run: python tests/kernels/golden/write_quant.py GOLDEN_FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

CHANNELS = 32
FLOAT32_ROWS = 3
PLAIN_TAGS = ("normal*2^-12", "normal*2^0", "normal*2^20", "heavy tail 0")
# Channels of one scale, and how many of them share a byte.
FORMATS = {
    "main": ("main_kv_fp4_e4m3", "packed", 16, 2),
    "index": ("index_k_fp4_ue8m0", "packed", 32, 2),
    "window": ("swa_fp8_ue8m0", "q_byte", 32, 1),
}


def hexadecimal(x: np.ndarray) -> list[str]:
    return [row.tobytes().hex() for row in np.ascontiguousarray(x)]


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    assert not (bits & 0xFFFF).any(), "the inputs are exact in BF16"
    return (bits >> 16).astype(np.uint16)


def cut_format(
    quant: dict[str, np.ndarray], prefix: str, codes: str, group: int, per_byte: int
) -> dict[str, list[str]]:
    tags = [str(tag) for tag in quant[f"{prefix}_row_tags"]]
    edges = [tag for tag in tags if not tag.startswith(("normal", "heavy"))]
    rows = [tags.index(tag) for tag in (*PLAIN_TAGS, *edges)]
    return {
        "tags": [tags[row] for row in rows],
        "x_bf16": hexadecimal(to_bf16(quant[f"{prefix}_x"][rows, :CHANNELS])),
        "codes": hexadecimal(quant[f"{prefix}_{codes}"][rows, : CHANNELS // per_byte]),
        "scale_codes": hexadecimal(quant[f"{prefix}_scale_byte"][rows, : CHANNELS // group]),
    }


def main(folder: Path) -> None:
    quant = dict(np.load(folder / "units" / "quant.npz"))
    content: dict[str, Any] = {name: cut_format(quant, *of) for name, of in FORMATS.items()}
    names = {"x": "x", "main": "main_kv", "index": "index", "window": "swa"}
    content["float32"] = {
        name: hexadecimal(quant[f"f32in_{golden}"][:FLOAT32_ROWS, :CHANNELS])
        for name, golden in names.items()
    }
    # How many of the BF16 numbers from the floor to 2688, in their order, have each scale code.
    scale_codes, counts = np.unique(quant["e4m3_scale_all_bf16_byte"], return_counts=True)
    content["main_scale_codes"] = {"code_min": int(scale_codes[0]), "counts": counts.tolist()}
    assert (np.diff(scale_codes.astype(int)) == 1).all()
    text = json.dumps(content, indent=1).replace(",\n   ", ", ")
    (Path(__file__).parent / "quant.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
