"""Keeps a store that answers nothing from costing every request a deadline of its own."""

from collections.abc import Callable
from threading import Lock


class CircuitBreaker:
    """Says whether to ask. May be used by several threads at once.

    closed --(a deadline, and nothing)--> open for `rest_s` --> one asks
       ^--------------------(it is answered)-----------------------'
    (he goes away before that: another one asks)
    """

    def __init__(self, *, rest_s: float, clock: Callable[[], float]) -> None:
        self._rest_s = rest_s
        self._clock = clock
        self._lock = Lock()
        self._open_until_s: float | None = None
        self._is_probed = False

    def may_ask(self) -> bool:
        """Whoever gets True has to `note` what came of it."""
        with self._lock:
            if self._open_until_s is None:
                return True
            if self._is_probed or self._clock() < self._open_until_s:
                return False
            self._is_probed = True
            return True

    def note(self, *, is_late: bool | None) -> None:
        """Somebody who asked has an answer, or `is_late`: his deadline, and nothing; None if he
        went away and nobody knows."""
        with self._lock:
            self._is_probed = False
            if is_late is not None:
                self._open_until_s = self._clock() + self._rest_s if is_late else None
