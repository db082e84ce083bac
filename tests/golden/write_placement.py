"""Writes placement.json: golden vectors of group choice and rotation.

It states docs/formats/cluster-map.md once more with whole numbers and math.log, without numpy and
without kvstore, so that the two can disagree. Run: python tests/golden/write_placement.py
"""

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import xxhash

MASK = 2**64 - 1


def mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def drawn(anchor: bytes, group: str) -> float:
    x = xxhash.xxh3_64_intdigest(anchor, seed=0) ^ xxhash.xxh3_64_intdigest(group.encode(), seed=0)
    return ((mixed(x) >> 12) + 0.5) * 2.0**-52


def best_group(anchor: bytes, weights: dict[str, float]) -> str:
    return max(sorted(weights), key=lambda name: weights[name] / -math.log(drawn(anchor, name)))


def vectors() -> dict[str, Any]:
    weights = {f"g{number}": float(1 + number % 3) for number in range(12)}
    spans = []
    for number in range(24):
        anchor = sha256(f"anchor {number}".encode()).digest()
        spans.append(
            {
                "anchor": anchor.hex(),
                "u_g0": drawn(anchor, "g0").hex(),
                "group": best_group(anchor, weights),
                "rotation_of_12": xxhash.xxh3_64_intdigest(anchor, seed=1) % 12,
                "rotation_of_3": xxhash.xxh3_64_intdigest(anchor, seed=1) % 3,
            }
        )
    return {"format": 1, "weights": weights, "spans": spans}


if __name__ == "__main__":
    text = json.dumps(vectors(), indent=1)
    Path(__file__).with_name("placement.json").write_text(text + "\n")
