"""Keeps freed slots out of use while bytes of them may still be on their way to a peer.

Without it nothing wrong would be believed: bytes of another shard do not fit the checksum that was
announced. But the client would take the shard for damaged. So the number of slots that rest is
bounded: a peer that takes an answer slowly must not make a target full.
"""

from __future__ import annotations

from collections.abc import Sequence

from .space import SlotRun


class RestingSlots:
    """Slots that rest until every sending that was under way when they were freed has ended.

    Sendings are counted in two phases. A new phase begins when nothing is left of the one before
    the last, so what was freed in a phase is waited for by that phase and the one before it only,
    however many sendings overlap.
    """

    def __init__(self) -> None:
        self.slot_count = 0
        self._phase = 0
        self._sendings = [0, 0]
        self._runs: list[list[SlotRun]] = [[], []]

    def begin_sending(self) -> int:
        """A sending begins. Returns the phase, for `end_sending`."""
        self._sendings[self._phase] += 1
        return self._phase

    def end_sending(self, phase: int) -> list[SlotRun]:
        """A sending has ended. Returns the slots that may be used again."""
        assert self._sendings[phase] > 0
        self._sendings[phase] -= 1
        return self._wake()

    def rest(self, runs: Sequence[SlotRun], slots_max: int) -> list[SlotRun]:
        """Let freed slots rest. Returns those that may be used at once.

        All of them if nothing is being sent, or if more than `slots_max` slots would rest.
        """
        count = sum(run.count for run in runs)
        if not any(self._sendings) or self.slot_count + count > slots_max:
            return list(runs)
        self._runs[self._phase] += runs
        self.slot_count += count
        return self._wake()

    def runs(self) -> list[SlotRun]:
        """All that rests."""
        return [*self._runs[0], *self._runs[1]]

    def _wake(self) -> list[SlotRun]:
        awake: list[SlotRun] = []
        while not self._sendings[1 - self._phase]:
            awake += self._runs[1 - self._phase]
            self._runs[1 - self._phase] = []
            if not self._runs[self._phase]:
                break
            self._phase = 1 - self._phase
        self.slot_count -= sum(run.count for run in awake)
        return awake
