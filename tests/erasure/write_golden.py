"""Write the golden vectors of the erasure code: python -m tests.erasure.write_golden

Run again only if the format changes on purpose, and then note it in the table of versions in
docs/formats/erasure-code.md. Uses the schoolbook arithmetic, not the erasure package.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.erasure import schoolbook

GOLDEN_DIR = Path(__file__).with_name("golden")
CODES = ((1, 0), (1, 1), (4, 2), (10, 2), (20, 12))
SHORT_SHARD_BYTES = 11
# Odd, and long enough for several whole vectors and a tail in any implementation.
LONG_SHARD_BYTES = 1_469


def golden_data(k: int, shard_bytes: int) -> list[bytes]:
    """Data shards by formula: byte t of the block is (131 t + floor(t / 256)) mod 256."""
    block = bytes((131 * t + t // 256) % 256 for t in range(k * shard_bytes))
    return [block[j * shard_bytes : (j + 1) * shard_bytes] for j in range(k)]


def golden_vector(k: int, m: int) -> dict[str, object]:
    """One code's vector: coefficients, a short block in full, a longer one by its hashes."""
    short = golden_data(k, SHORT_SHARD_BYTES)
    long = golden_data(k, LONG_SHARD_BYTES)
    return {
        "format": 1,
        "k": k,
        "m": m,
        "field_polynomial": "0x11d",
        "parity_rows_hex": [bytes(row).hex() for row in schoolbook.parity_rows(k, m)],
        "short": {
            "shard_bytes": SHORT_SHARD_BYTES,
            "data_hex": [shard.hex() for shard in short],
            "parity_hex": [shard.hex() for shard in schoolbook.encode(short, m)],
        },
        "long": {
            "shard_bytes": LONG_SHARD_BYTES,
            "data_formula": "byte t of the block = (131 * t + floor(t / 256)) mod 256",
            "parity_sha256": [
                hashlib.sha256(shard).hexdigest() for shard in schoolbook.encode(long, m)
            ],
        },
    }


def golden_text(k: int, m: int) -> str:
    """The exact text of one golden file."""
    return json.dumps(golden_vector(k, m), indent=2) + "\n"


def golden_path(k: int, m: int) -> Path:
    """Where the vector of a code lies."""
    return GOLDEN_DIR / f"erasure_{k}+{m}.json"


def main() -> None:
    """Write all files anew."""
    for k, m in CODES:
        golden_path(k, m).write_text(golden_text(k, m))


if __name__ == "__main__":
    main()
