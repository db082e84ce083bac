"""What became of the attempts to have a request answered, in words, without end. Pure."""

from __future__ import annotations

from ..worker.address import WorkerAddress

KEPT_MAX = 64


class Trials:
    """The latest things that happened, each once, however often it did."""

    def __init__(self) -> None:
        self.total = 0
        self._times: dict[str, int] = {}
        """By what happened; the latest is last."""

    def note(self, place: WorkerAddress, what: str) -> None:
        """An attempt at a worker did not end the answer."""
        self.total += 1
        text = f"{place}: {what}"
        self._times[text] = self._times.pop(text, 0) + 1
        if len(self._times) > KEPT_MAX:
            del self._times[next(iter(self._times))]

    def describe(self) -> tuple[str, ...]:
        """One text for each, in the order in which they happened last."""
        return tuple(
            text if times == 1 else f"{text} ({times} times)" for text, times in self._times.items()
        )
