"""Operating errors of a store, and of the device that its blocks are moved to and from: which they
are, and how many. None of them fails a request."""

import logging
import time
from collections.abc import Callable
from threading import Lock

from kvstore.errors import StoreError

from .errors import RebuiltWrong, TransferFailed

log = logging.getLogger(__name__)

STORE_ERRORS = (StoreError, OSError)
"""What a store may raise. Anything else is a mistake in the program and is not hidden."""

LOG_EVERY_S = 60.0
"""Between two lines of the log about errors of one kind: a dead store fails every request."""


class StoreFaults:
    """Counts errors by whose they are. The log has the first of each kind, and after that one of
    LOG_EVERY_S at most, so that it says as well when a store that came back fails again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._store = _Kind()
        self._transfers = _Kind()

    @property
    def count(self) -> int:
        """Errors of the store."""
        return self._store.count

    @property
    def transfers(self) -> int:
        """Errors of the device: bytes that did not get into the pool, or out of it."""
        return self._transfers.count

    def note(self, operation: str, error: Exception) -> None:
        """Count an error. `operation` is a verb for people: "match", "fetch", "save"."""
        # A block that was rebuilt wrong was moved well; what a node sent was wrong.
        is_transfer = isinstance(error, TransferFailed) and not isinstance(error, RebuiltWrong)
        with self._lock:
            kind = self._transfers if is_transfer else self._store
            unsaid = kind.add(self._clock())
        if unsaid is None:
            return
        more = f" ({unsaid} more of these before)" if unsaid else ""
        if is_transfer:
            log.error(
                "blocks were not moved: %s failed, going on without it: %s%s",
                operation,
                error,
                more,
            )
        else:
            log.warning("block store: %s failed, going on without it: %s%s", operation, error, more)


class _Kind:
    """Errors that are counted together."""

    def __init__(self) -> None:
        self.count = 0
        self._said_count = 0
        self._said_s: float | None = None

    def add(self, now_s: float) -> int | None:
        """Count one more. If it is to be said: how many before it were not; else None."""
        self.count += 1
        if self._said_s is not None and now_s - self._said_s < LOG_EVERY_S:
            return None
        unsaid = self.count - 1 - self._said_count
        self._said_count, self._said_s = self.count, now_s
        return unsaid
