"""The interface of a back end: multiplying shards by a small matrix over GF(2^8).

A back end knows nothing of k + m, losses or layouts: `erasure.code` turns both encoding and
reconstruction into such products. All back ends give the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ShardProduct(ABC):
    """Multiplication of shards by one fixed matrix. May be used by many threads at once."""

    @abstractmethod
    def apply_at(
        self,
        source_addresses: NDArray[np.uintp],
        target_addresses: NDArray[np.uintp],
        *,
        shard_bytes: int,
    ) -> None:
        """Set target[b][r] = XOR over j of coefficient[r][j] * source[b][j], bytewise.

        Address tables are C-contiguous uintp arrays, (n, columns) for sources and (n, rows) for
        targets, of memory the caller keeps alive and apart: a target shares no byte with a
        source or another target. Nothing is checked here. Sources do not change; repeating a
        call does no harm. n = 0 does nothing. shard_bytes is any positive length; addresses
        need no alignment.
        """


class Multiplier(ABC):
    """A way to multiply shards, for instance a library."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which `choose_multiplier` knows this back end."""

    @abstractmethod
    def prepare(self, coefficients: NDArray[np.uint8]) -> ShardProduct:
        """Make the product for a uint8 matrix of shape (rows, columns), both at least 1.

        The matrix is copied into the back end's own tables; this takes microseconds, so products
        used again are worth keeping.
        """
