"""What became of the blocks that were handed over to be saved. Not for the saving itself."""

from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSummary:
    """Blocks of one request, or of all, by what became of them.

    `dropped` never reached the store because the queue was full, a request needed the memory or
    the engine ended; `pending` were not through when this was read.
    """

    stored: int = 0
    known: int = 0
    failed: int = 0
    dropped: int = 0
    pending: int = 0


class SaveReceipt:
    """Follows the saves of one request; `summary` may be read at any time from any thread.

    `total` follows those of all requests.
    """

    def __init__(self, total: "SaveReceipt | None" = None) -> None:
        self._total = total
        self._lock = Lock()
        self._counts = dict.fromkeys(("stored", "known", "failed", "dropped", "pending"), 0)

    def summary(self) -> SaveSummary:
        with self._lock:
            return SaveSummary(**self._counts)

    def expect(self, blocks: int) -> None:
        with self._lock:
            self._counts["pending"] += blocks
        if self._total is not None:
            self._total.expect(blocks)

    def settle(self, **blocks_by_outcome: int) -> None:
        """Move blocks from pending to their outcomes."""
        with self._lock:
            for outcome, blocks in blocks_by_outcome.items():
                self._counts[outcome] += blocks
                self._counts["pending"] -= blocks
        if self._total is not None:
            self._total.settle(**blocks_by_outcome)
