"""Rows of the Engram tables: hashes of the last few tokens.

The rows must be those that the tables were trained with, so every number here is fixed: primes,
multipliers and the order of columns (size of the n-gram outside, head inside).
"""

from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np
import torch

_INT64_MAX = 2**63 - 1
_SEED_STEP = 10_007
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Enough for every number below 3.3e24 (Sorenson and Webster, 2015)."""


def plan_tables(
    *, tables: int, ngram_max: int, heads: int, base_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Primes and offsets, int64 [tables, columns] each.

    A table has a range of rows for each column, that is each n-gram size (2 .. `ngram_max`) and
    head: from its offset on, as many as its prime. Primes go up from `base_rows`, each used once
    over all tables; a table's sum is its number of rows.
    """
    columns = (ngram_max - 1) * heads
    primes = torch.tensor(list(islice(_primes_from(base_rows), tables * columns)))
    primes = primes.view(tables, columns)
    return primes, primes.cumsum(-1) - primes


def _primes_from(start: int) -> Iterator[int]:
    return (number for number in count(max(start, 2)) if _is_prime(number))


def _is_prime(number: int) -> bool:
    """Miller and Rabin's test with witnesses that leave no doubt for 64 bit numbers."""
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    twos = ((number - 1) & -(number - 1)).bit_length() - 1
    return all(_passes(number, witness, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, twos: int) -> bool:
    power = pow(witness, (number - 1) >> twos, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def ngram_multipliers(
    layer_ids: Sequence[int], compressed_vocabulary: int, ngram_max: int
) -> torch.Tensor:
    """int64 [layers, ngram_max]: odd multipliers of lookback 0, 1, ..; a product never overflows.

    Drawn by NumPy's default generator, seeded with 10,007 x layer number.
    """
    bound = max(1, _INT64_MAX // compressed_vocabulary // 2)
    drawn = [
        np.random.default_rng(_SEED_STEP * layer).integers(0, bound, ngram_max, dtype=np.int64)
        for layer in layer_ids
    ]
    return torch.from_numpy(np.stack(drawn)) * 2 + 1


def hash_ngrams(
    compressed_ids: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad_id: int,
) -> torch.Tensor:
    """Rows int64 [..., T, columns] of one table, for the last T of the ids.

    `compressed_ids`: int64 [..., ngram_max - 1 + T], -1 for image tokens and before the start of
    the sequence: from such a token on, all that lies further back is `pad_id`. `multipliers`
    [ngram_max], `primes` and `offsets` [columns]: those of the table. The hash of the newest r + 1
    tokens is the XOR of id x multiplier over lookbacks 0 .. r; a column's row is its hash modulo
    the column's prime, from its offset on.
    """
    ngram_max = len(multipliers)
    ids = compressed_ids.unfold(-1, ngram_max, 1).flip(-1)
    is_known = ids.cummin(-1).values >= 0
    terms = torch.where(is_known, ids, pad_id) * multipliers
    mixed, *others = terms.unbind(-1)
    hashes = []
    for term in others:
        mixed = mixed ^ term
        hashes.append(mixed)
    heads = len(primes) // len(hashes)
    return torch.stack(hashes, -1).repeat_interleave(heads, -1) % primes + offsets
