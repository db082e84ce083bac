"""The code computed the long way, as docs/formats/erasure-code.md defines it.

Shares nothing with the erasure package, so that both being wrong alike is unlikely: no tables, no
logarithms, no numpy. Slow, for small shards only.
"""

from __future__ import annotations

from functools import cache


def multiply(left: int, right: int) -> int:
    """Product in GF(2)[x] modulo x^8 + x^4 + x^3 + x^2 + 1, by shifting and adding."""
    product = 0
    while right:
        if right & 1:
            product ^= left
        left <<= 1
        if left & 0x100:
            left ^= 0x11D
        right >>= 1
    return product


@cache
def inverse(element: int) -> int:
    """The partner of an element that is not zero, by trying all."""
    return next(partner for partner in range(1, 256) if multiply(element, partner) == 1)


def parity_rows(k: int, m: int) -> list[list[int]]:
    """The Cauchy rows: coefficient of data shard j in parity shard i is 1 / ((k + i) xor j)."""
    return [[inverse((k + i) ^ j) for j in range(k)] for i in range(m)]


def encode(data: list[bytes], m: int) -> list[bytes]:
    """The m parity shards of the data shards."""
    parity = []
    for row in parity_rows(len(data), m):
        total = bytearray(len(data[0]))
        for coefficient, shard in zip(row, data, strict=True):
            for position, byte in enumerate(shard):
                total[position] ^= multiply(coefficient, byte)
        parity.append(bytes(total))
    return parity
