"""Operating errors of a store, and of the device that its blocks are moved to and from: which they
are, and how many. None of them fails a request."""

import logging
from threading import Lock

from kvstore.errors import StoreError

from .errors import RebuiltWrong, TransferFailed

log = logging.getLogger(__name__)

STORE_ERRORS = (StoreError, OSError)
"""What a store may raise. Anything else is a mistake in the program and is not hidden."""


class StoreFaults:
    """Counts errors by whose they are, and logs only the first of each: a dead store fails every
    request."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._transfers = 0

    @property
    def count(self) -> int:
        """Errors of the store."""
        return self._count

    @property
    def transfers(self) -> int:
        """Errors of the device: bytes that did not get into the pool, or out of it."""
        return self._transfers

    def note(self, operation: str, error: Exception) -> None:
        """Count an error. `operation` is a verb for people: "match", "fetch", "save"."""
        # A block that was rebuilt wrong was moved well; what a node sent was wrong.
        is_transfer = isinstance(error, TransferFailed) and not isinstance(error, RebuiltWrong)
        with self._lock:
            self._transfers += is_transfer
            self._count += not is_transfer
            is_first = (self._transfers if is_transfer else self._count) == 1
        if is_first and is_transfer:
            log.error("blocks were not moved: %s failed, going on without it: %s", operation, error)
        elif is_first:
            log.warning("block store: %s failed, going on without it: %s", operation, error)
