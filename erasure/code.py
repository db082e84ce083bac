"""The k + m code: parity out of data shards, and lost shards out of any k that are left.

Batched over many blocks in one call and in place on the caller's memory. Two surfaces: buffers
(checked in full), and address tables for hot paths that keep their own. Not for checksums: an
erasure code repairs what is known to be lost; wrong bytes in give wrong bytes out.
"""

from __future__ import annotations

from functools import lru_cache, partial
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from .buffers import (
    BufferAddresses,
    addresses_of,
    require_disjoint,
    require_shard_bytes,
    require_table,
    shard_addresses,
)
from .choice import choose_multiplier
from .errors import BufferCountError, CodeShapeError, ErasureError, ShardSelectionError
from .matrix import cauchy_generator, reconstruction_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

    from .buffers import Buffers
    from .multiplier import Multiplier, ShardProduct

# What other packages use; they import this module and no other of the package.
__all__ = ["BufferAddresses", "Code", "ErasureError", "addresses_of", "shard_addresses"]

# Keeps address tables and matrices small; the matrix itself would allow 256.
SHARDS_MAX = 32
# Holds all 198 patterns of 10+2: 12 single losses, each from any 10 of 11 others, 66 double ones.
# Codes with more make the table of the least recently used pattern again.
DECODE_TABLES_MAX = 256


class Code:
    """A systematic Cauchy Reed-Solomon code of k data and m parity shards.

    Shards 0 .. k-1 are data, k .. k+m-1 parity; any k of them are enough. A code does not change
    after it is made, except for its cache of decode tables, and may be shared by threads.
    """

    def __init__(self, k: int, m: int, multiplier: Multiplier | None = None) -> None:
        """1 <= k, 0 <= m, k + m <= 32, else CodeShapeError. Default: the process's back end."""
        if not (isinstance(k, int) and isinstance(m, int) and k >= 1 and 0 <= m <= SHARDS_MAX - k):
            raise CodeShapeError(
                "code k+m", f"{k!r}+{m!r}", f"ints with 1 <= k, 0 <= m, k + m <= {SHARDS_MAX}"
            )
        self._k = k
        self._m = m
        self._multiplier = choose_multiplier() if multiplier is None else multiplier
        generator = cauchy_generator(k, m)
        self._parity_product = self._multiplier.prepare(generator[k:]) if m else None
        # The cache is bounded and takes care of threads; it holds no reference to this object.
        self._repair_product = lru_cache(maxsize=DECODE_TABLES_MAX)(
            partial(_prepare_repair, self._multiplier, generator)
        )

    def __repr__(self) -> str:
        return f"Code({self._k}, {self._m}, {self._multiplier.name})"

    @property
    def k(self) -> int:
        """Number of data shards."""
        return self._k

    @property
    def m(self) -> int:
        """Number of parity shards."""
        return self._m

    @property
    def multiplier(self) -> Multiplier:
        """The back end in use."""
        return self._multiplier

    @property
    def decode_table_count(self) -> int:
        """Number of loss patterns whose tables are cached, at most DECODE_TABLES_MAX."""
        return self._repair_product.cache_info().currsize

    def encode(
        self,
        blocks: Buffers,
        parity: Buffers,
        *,
        shard_bytes: int,
    ) -> None:
        """Write the m parity shards of each of n blocks.

        blocks: n buffers of at least k * shard_bytes, shard j at byte j * shard_bytes. parity: n
        writable buffers of at least m * shard_bytes, shard k + i at byte i * shard_bytes. Bytes
        beyond stay as they are. Raises ShardLengthError, BufferCountError, BufferLengthError,
        BufferAccessError or BufferOverlapError before anything is written.
        """
        require_shard_bytes(shard_bytes)
        if len(parity) != len(blocks):
            raise BufferCountError("parity", f"{len(parity)} buffers", f"{len(blocks)}, as blocks")
        if not self._m or not len(blocks):
            return
        block_bytes, parity_bytes = self._k * shard_bytes, self._m * shard_bytes
        with (
            addresses_of(blocks, writable=False, min_bytes=block_bytes, name="blocks") as data,
            addresses_of(parity, writable=True, min_bytes=parity_bytes, name="parity") as made,
        ):
            require_disjoint(made.addresses, parity_bytes, data.addresses, block_bytes)
            self.encode_at(
                shard_addresses(data.addresses, self._k, shard_bytes=shard_bytes),
                shard_addresses(made.addresses, self._m, shard_bytes=shard_bytes),
                shard_bytes=shard_bytes,
            )

    def encode_at(
        self,
        data_addresses: NDArray[np.uintp],
        parity_addresses: NDArray[np.uintp],
        *,
        shard_bytes: int,
    ) -> None:
        """Write parity by address tables: uintp (n, k) of data and (n, m) of parity shards.

        The caller keeps the memory alive, shard_bytes long at each address, with no parity shard
        sharing a byte with any other shard: this is not checked. Raises ShardLengthError or
        AddressTableError (dtype, shape, null address).
        """
        require_shard_bytes(shard_bytes)
        blocks = len(data_addresses)
        data = require_table("data_addresses", data_addresses, blocks=blocks, columns=self._k)
        made = require_table("parity_addresses", parity_addresses, blocks=blocks, columns=self._m)
        if self._parity_product is not None:
            self._parity_product.apply_at(data, made, shard_bytes=shard_bytes)

    def reconstruct(
        self,
        missing: Sequence[int],
        available: Sequence[int],
        sources: Sequence[Buffers],
        targets: Sequence[Buffers],
        *,
        shard_bytes: int,
    ) -> None:
        """Write the missing shards of each of n blocks, data and parity alike.

        missing: indices wanted. available: exactly k other indices, in any order. sources: for
        each block the k buffers of `available`, in its order; targets: for each block the
        writable buffers of `missing`, in its order; each at least shard_bytes. Raises
        ShardSelectionError, ShardLengthError, BufferCountError, BufferLengthError,
        BufferAccessError or BufferOverlapError before anything is written.
        """
        require_shard_bytes(shard_bytes)
        self._select(missing, available)
        if len(targets) != len(sources):
            raise BufferCountError("targets", f"{len(targets)} blocks", f"{len(sources)}")
        read = _flatten("sources", sources, self._k)
        made = _flatten("targets", targets, len(missing))
        if not made:
            return
        with (
            addresses_of(
                read,
                writable=False,
                min_bytes=shard_bytes,
                name=partial(_shard_label, "sources", self._k),
            ) as source,
            addresses_of(
                made,
                writable=True,
                min_bytes=shard_bytes,
                name=partial(_shard_label, "targets", len(missing)),
            ) as target,
        ):
            require_disjoint(target.addresses, shard_bytes, source.addresses, shard_bytes)
            self.reconstruct_at(
                missing,
                available,
                source.addresses.reshape(-1, self._k),
                target.addresses.reshape(-1, len(missing)),
                shard_bytes=shard_bytes,
            )

    def reconstruct_at(
        self,
        missing: Sequence[int],
        available: Sequence[int],
        source_addresses: NDArray[np.uintp],
        target_addresses: NDArray[np.uintp],
        *,
        shard_bytes: int,
    ) -> None:
        """Write missing shards by address tables: uintp (n, k) sources, (n, len(missing)) targets.

        Columns follow `available` and `missing`; ascending ones save a copy of the tables. The
        caller keeps the memory alive, shard_bytes long at each address, with no target sharing a
        byte with any other shard: this is not checked. Raises ShardSelectionError,
        ShardLengthError or AddressTableError (dtype, shape, null address).
        """
        require_shard_bytes(shard_bytes)
        product, missing_order, available_order = self._select(missing, available)
        blocks = len(source_addresses)
        sources = require_table(
            "source_addresses", source_addresses, blocks=blocks, columns=self._k
        )
        targets = require_table(
            "target_addresses", target_addresses, blocks=blocks, columns=len(missing)
        )
        if available_order is not None:
            sources = np.ascontiguousarray(sources[:, available_order])
        if missing_order is not None:
            targets = np.ascontiguousarray(targets[:, missing_order])
        if product is not None:
            product.apply_at(sources, targets, shard_bytes=shard_bytes)

    def coefficients(self, missing: Sequence[int], available: Sequence[int]) -> NDArray[np.uint8]:
        """What makes the missing shards out of k available ones, for who multiplies elsewhere:
        uint8 (len(missing), k), in the order of both. Raises ShardSelectionError."""
        for name, indices in (("missing", missing), ("available", available)):
            _ascending(name, indices)
        _require_selection(self._k + self._m, self._k, missing, available)
        return reconstruction_rows(cauchy_generator(self._k, self._m), missing, available)

    def _select(
        self, missing: Sequence[int], available: Sequence[int]
    ) -> tuple[ShardProduct | None, list[int] | None, list[int] | None]:
        # Ascending order makes one cache entry of all orders in which shards may arrive.
        wanted, missing_order = _ascending("missing", missing)
        given, available_order = _ascending("available", available)
        return self._repair_product(wanted, given), missing_order, available_order


def _ascending(name: str, indices: Sequence[int]) -> tuple[tuple[int, ...], list[int] | None]:
    """Sorted indices, and the positions they came from unless they were sorted already."""
    try:
        values = tuple(map(index, indices))
    except TypeError as error:
        raise ShardSelectionError(name, repr(indices), "a sequence of shard indices") from error
    ordered = tuple(sorted(values))
    if ordered == values:
        return ordered, None
    return ordered, sorted(range(len(values)), key=values.__getitem__)


def _prepare_repair(
    multiplier: Multiplier,
    generator: NDArray[np.uint8],
    missing: tuple[int, ...],
    available: tuple[int, ...],
) -> ShardProduct | None:
    """Check a selection and make its product; None if nothing is missing.

    Runs once for a pattern, as its result is cached: a hit needs no check.
    """
    total, k = generator.shape
    _require_selection(total, k, missing, available)
    if not missing:
        return None
    return multiplier.prepare(reconstruction_rows(generator, missing, available))


def _require_selection(
    total: int, k: int, missing: Sequence[int], available: Sequence[int]
) -> None:
    """Raise ShardSelectionError unless these are shards of one code, k available ones apart."""
    for name, indices in (("missing", missing), ("available", available)):
        if len(set(indices)) < len(indices) or not set(indices) <= set(range(total)):
            raise ShardSelectionError(
                name, list(indices), f"different shard indices from 0 to {total - 1}"
            )
    if len(available) != k:
        raise ShardSelectionError("available", list(available), f"exactly {k} shard indices")
    both = sorted(set(missing) & set(available))
    if both:
        raise ShardSelectionError(
            "missing", list(missing), f"none of the available ones, but {both} are"
        )


def _flatten(name: str, rows: Sequence[Buffers], columns: int) -> list[ReadableBuffer]:
    """Put the buffers of all blocks into one list; BufferCountError if a row is not in shape."""
    for position, row in enumerate(rows):
        if len(row) != columns:
            raise BufferCountError(f"{name}[{position}]", f"{len(row)} buffers", columns)
    return [buffer for row in rows for buffer in row]


def _shard_label(name: str, columns: int, position: int) -> str:
    return f"{name}[{position // columns}][{position % columns}]"
