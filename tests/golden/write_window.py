"""Writes window.json: golden vectors of the choice of entrypoints and of heads of window records.

It states docs/formats/window.md once more with whole numbers and by hand, without numpy, struct and
kvstore, so that the two can disagree. Run: python tests/golden/write_window.py
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import xxhash

MASK = 2**64 - 1
NAMES = ("ep-a", "ep-b", "ep-c", "10.0.0.1", "Z", "entrypoint-with-a-name-of-32-char")


def little(value: int, size_bytes: int) -> bytes:
    return bytes(value >> 8 * at & 0xFF for at in range(size_bytes))


def mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def score(key: bytes, name: str) -> int:
    word = sum(byte << 8 * at for at, byte in enumerate(key[:8]))
    return mixed(word ^ xxhash.xxh3_64_intdigest(name.encode(), seed=2))


def choice(number: int) -> dict[str, Any]:
    key = sha256(f"window {number}".encode()).digest()
    best = {
        str(count): max(sorted(NAMES[:count]), key=lambda name: score(key, name))
        for count in (1, 2, 3, 6)
    }
    return {"key": key.hex(), "score_ep_a": f"{score(key, 'ep-a'):016x}", "best_of_first": best}


def head(number: int) -> dict[str, Any]:
    data = sha256(f"record {number}".encode()).digest() * (32 + number)
    key, space = sha256(f"key {number}".encode()).digest(), sha256(b"namespace").digest()[:16]
    sections = [{"bytes": len(data), "name": "L0"}]
    canonical = json.dumps({"sections": sections}, sort_keys=True, separators=(",", ":"))
    layout = sha256(canonical.encode()).digest()[:16]
    ttl_ms = 180_000 - number
    numbers = little(xxhash.xxh3_64_intdigest(data), 8) + little(len(data), 4) + little(ttl_ms, 4)
    return {
        "key": key.hex(),
        "namespace_id": space.hex(),
        "layout": canonical,
        "data": f"sha256('record {number}') {32 + number} times",
        "ttl_ms": ttl_ms,
        "head": (key + space + layout + numbers).hex(),
    }


def vectors() -> dict[str, Any]:
    return {
        "format": 1,
        "names": NAMES,
        "choices": [choice(number) for number in range(24)],
        "heads": [head(number) for number in range(3)],
    }


if __name__ == "__main__":
    text = json.dumps(vectors(), indent=1)
    Path(__file__).with_name("window.json").write_text(text + "\n")
