"""Operating errors of a store: which they are, and how many. None of them fails a request."""

import logging
from threading import Lock

from kvstore.errors import StoreError

log = logging.getLogger(__name__)

STORE_ERRORS = (StoreError, OSError)
"""What a store may raise. Anything else is a mistake in the program and is not hidden."""


class StoreFaults:
    """Counts the errors of a store and logs only the first: a dead store fails every request."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def note(self, operation: str, error: Exception) -> None:
        """Count an error. `operation` is a verb for people: "match", "fetch", "save"."""
        with self._lock:
            self._count += 1
            is_first = self._count == 1
        if is_first:
            log.warning("block store: %s failed, going on without it: %s", operation, error)
