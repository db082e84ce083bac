"""What the engine asks of a store of KV blocks.

The engine owns this interface; the blocking clients of `kvstore.client` fit it, that of the host's
agent and that of the nodes, and so does anything that keeps bytes by key.
"""

from collections.abc import Sequence
from typing import Protocol

from kvstore.key import Namespace


class FetchOutcome(Protocol):
    @property
    def blocks(self) -> int:
        """Leading blocks delivered whole and verified."""

    @property
    def rejected_shards(self) -> int:
        """Pieces that came but were damaged; none of their bytes are among the delivered."""


class SaveOutcome(Protocol):
    """Blocks by what became of them; the three add up to the blocks given."""

    @property
    def stored(self) -> int: ...

    @property
    def known(self) -> int:
        """Blocks that were there already."""

    @property
    def failed(self) -> int: ...


class BlockStore(Protocol):
    """A store of blocks by key. Calls may come from several threads at once.

    `keys` is always the key chain of a prompt from its first block on; `buffers[j]` belongs to
    block `first_block + j`. Errors are `kvstore.errors.StoreError` or OSError; the engine goes on
    without the store. A miss, a short run or "not stored" are values.
    """

    def match(self, namespace: Namespace, keys: Sequence[bytes], /) -> int:
        """Number of leading blocks present; a hint, changes nothing."""

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        /,
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> FetchOutcome:
        """Write blocks into `buffers`, in place; those behind the delivered run may hold anything.

        After it has returned no buffer is written any more.
        """

    def save(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        /,
        *,
        first_block: int = 0,
        ttl_class: str = "chat",
    ) -> SaveOutcome:
        """Store blocks. Buffers are read until it returns, not after, and never written."""
