"""Ctrl-C and SIGTERM end the demo once, and never in the middle of what must be whole."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """While in use, the first of SIGNALS raises KeyboardInterrupt; later ones are ignored.

    Within `held` the first one waits until the block has ended. Only for the main thread.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that came, if one did."""
        self._is_held = False
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that a signal ended."""
        return 128 + (self.number or signal.SIGINT)

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            return
        self.number = number
        if not self._is_held:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block that is not interrupted; an interruption that came in it is raised behind it."""
        was_interrupted = self.number is not None
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self.number is not None and not was_interrupted:
            raise KeyboardInterrupt
