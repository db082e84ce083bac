"""A leased run of the arena, as an engine sees it: its memory, and what of it is ready.

Readiness is read from the run's progress table, which the agent's workers fill, so that waiting for
a section costs no message. Nothing here asks the agent for anything.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import warnings
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from threading import Lock
from types import TracebackType
from typing import Self

from ..arena.losses import BlockLoss, read_losses
from ..arena.progress import ProgressReader, clear_table, has_table
from ..arena.region import RunMemory
from ..arena.run_layout import RunLayout
from ..arena.wakeup import drain
from ..errors import AgentError, InvalidArgument, StoreError

SLEEP_S_MAX = 3600.0
"""The kernel counts milliseconds in 32 bits."""


class _State(Enum):
    LEASED = "leased"
    FETCHING = "being fetched into"
    OFFERING = "being offered"
    OFFERED = "offered to other engines"
    HANDED_OVER = "handed over to be saved"
    RELEASED = "released"
    LOST = "lost with its agent"


class ArenaRun:
    """Memory for `blocks` blocks, laid out section by section. Release it, or use it in `with`.

    After the release, and after a call raised AgentError, the memory may be somebody else's: views
    of it must not be used any more. A run that is forgotten is released when the interpreter finds
    out, with a ResourceWarning; so keep it as long as views of it are used. One thread at a time
    waits for a run, either by `wait_ready` or, in the client's event loop, by `until_ready`.
    """

    def __init__(
        self,
        memory: RunMemory,
        number: int,
        wakeup: int,
        *,
        give_back: Callable[[int], None],
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        """The run owns `wakeup`, the reading end of its wake-ups, from now on."""
        self.number = number
        self._memory = memory
        self._wakeup = wakeup
        self._bell = -1
        """Eventfd of this process alone, by which it wakes a thread of its own that waits."""
        self._give_back = give_back
        self._loop = loop
        self._clock = clock
        self._state = _State.LEASED
        self._failure: AgentError | None = None
        self._is_answered = False
        self._is_cut_off = False
        """Nobody has the writing end any more."""
        self._progress: ProgressReader | None = None
        self._state_lock = Lock()
        self._waiting_lock = Lock()
        self._sleepers: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        layout = self._memory.layout
        return (
            f"<ArenaRun {self.number}: {layout.blocks} blocks of {layout.layout.block_bytes} "
            f"bytes, {self._state.value}>"
        )

    @property
    def blocks(self) -> int:
        """Blocks that have room here: those asked for, or fewer if the arena was full."""
        return self._memory.layout.blocks

    @property
    def layout(self) -> RunLayout:
        """Where everything lies in the run."""
        return self._memory.layout

    @property
    def address(self) -> int:
        """Where the run begins in this process's memory; offsets of `layout` count from here."""
        self._check()
        return self._memory.address

    def section(self, section: int) -> memoryview:
        """A section of all blocks, writable: block after block, sections[section].bytes each."""
        self._check()
        return self._memory.section(section)

    def part(self, section: int, block: int) -> memoryview:
        """A section of one block, writable."""
        self._check()
        if not 0 <= block < self.blocks:
            raise InvalidArgument("block", given=block, expected=f"0 to {self.blocks - 1}")
        return self._memory.part(section, block)

    def losses(self, first: int, end: int) -> list[BlockLoss]:
        """Which of the blocks `first` to `end` are to be rebuilt before they are used, of those
        that have some section ready; after a fetch with rebuild="reader". Raises AgentError, and
        StoreError if what stands in the run makes no sense."""
        self._check()
        return read_losses(self._memory, first, end)

    def parity(self, first: int, end: int) -> memoryview:
        """The parity shards of the blocks `first` to `end`: of each its m, one after the other. Of
        a run that was leased with room for them."""
        self._check()
        if self.layout.code is None:
            raise InvalidArgument("run", given="one without parity", expected="room for parity")
        return self._memory.parity(first, end)

    # Readiness ----------------------------------------------------------------------------------

    def ready_blocks(self, section: int) -> int:
        """So many leading blocks of the fetch have this section, verified. Raises AgentError."""
        self._check()
        progress = self._read_progress()
        return 0 if progress is None else min(progress.ready_blocks(section), self.blocks)

    @property
    def is_ended(self) -> bool:
        """Nothing more comes; also where no fetch was begun, or the run is lost."""
        if self._state is not _State.FETCHING or self._is_answered or self._is_cut_off:
            return True
        progress = self._read_progress()
        return progress is not None and progress.is_ended

    def wait_ready(self, section: int, blocks: int, deadline_s: float) -> int:
        """Block this thread until `blocks` leading blocks have the section, nothing more comes, or
        `deadline_s` is over; the number that have it. Returns or raises AgentError as soon as the
        agent dies; raises StoreError if the system has no descriptor to wait with.
        """
        end_s = self._clock() + deadline_s
        if not self._waiting_lock.acquire(timeout=min(max(deadline_s, 0.0), SLEEP_S_MAX)):
            return self.ready_blocks(section)
        try:
            while True:
                # In this order: what came before the end is counted.
                is_ended = self.is_ended
                ready = self.ready_blocks(section)
                left_s = end_s - self._clock()
                if ready >= blocks or is_ended or left_s <= 0:
                    return ready
                if self._bell < 0:
                    self._make_bell()
                    continue  # what came before there was one
                poll = select.poll()
                poll.register(self._wakeup, select.POLLIN)
                poll.register(self._bell, select.POLLIN)
                poll.poll(math.ceil(min(left_s, SLEEP_S_MAX) * 1000))
                self._clear_events()
        finally:
            self._waiting_lock.release()

    async def until_ready(self, section: int, blocks: int, deadline_s: float) -> int:
        """`wait_ready` for the client's event loop."""
        end_s = self._clock() + deadline_s
        while True:
            is_ended = self.is_ended
            ready = self.ready_blocks(section)
            left_s = end_s - self._clock()
            if ready >= blocks or is_ended or left_s <= 0:
                return ready
            await self.until_changed(left_s)

    async def until_changed(self, deadline_s: float) -> None:
        """Return when something became ready or ended since the last return, or at the deadline."""
        sleeper: asyncio.Future[None] = self._loop.create_future()
        with self._state_lock:  # a thread that releases the run closes the descriptor
            self._check()
            if self._is_answered:
                sleeper.set_result(None)  # nothing will change any more
            if not self._sleepers and not self._is_cut_off:
                self._loop.add_reader(self._wakeup, self._note_wakeup)
            self._sleepers.add(sleeper)
        try:
            await asyncio.wait({sleeper}, timeout=max(deadline_s, 0.0))
        finally:
            with self._state_lock:
                self._sleepers.discard(sleeper)
                if not self._sleepers and self._wakeup >= 0:
                    self._loop.remove_reader(self._wakeup)

    def _note_wakeup(self) -> None:
        """In the loop: there is something at the reading end, perhaps its end."""
        with self._state_lock:
            if self._wakeup < 0:
                return
            self._is_cut_off = not drain(self._wakeup)
            if self._is_cut_off:
                self._loop.remove_reader(self._wakeup)
        self._wake_sleepers()

    def _wake_sleepers(self) -> None:
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    def _make_bell(self) -> None:
        with self._state_lock:
            try:
                self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            except OSError as error:
                raise StoreError(f"no descriptor to wait with: {error.strerror}") from error

    def _clear_events(self) -> None:
        """Before the table is read: what comes behind this wakes the next wait at once."""
        with self._state_lock, suppress(BlockingIOError):
            self._is_cut_off = not drain(self._wakeup)
            os.eventfd_read(self._bell)

    def _read_progress(self) -> ProgressReader | None:
        """The table of the fetch, or None until the agent has begun it."""
        if self._state is not _State.FETCHING:
            return None
        if self._progress is None and has_table(self._memory):
            self._progress = ProgressReader(self._memory)
        return self._progress

    # Ends ---------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give the run back; a fetch into it is given up. May be called again, by any thread."""
        with self._state_lock:
            has_run = self._state in (_State.LEASED, _State.FETCHING)
            is_given = self._state in (_State.OFFERED, _State.HANDED_OVER)
            if not is_given and self._failure is None:
                self._state = _State.RELEASED
        if has_run:
            self._give_back(self.number)
        self._close_events()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # Nobody else has the run, so no lock of it is taken. It may be any thread, in the middle of
        # anything, the client's own lines included: so the loop gives it back when it has time.
        is_leased = self._state in (_State.LEASED, _State.FETCHING)
        self._close_descriptors()
        if is_leased:
            with suppress(RuntimeError):  # the loop is closed, and the run went with its client
                self._loop.call_soon_threadsafe(self._give_back, self.number)
            warnings.warn(f"nobody released {self!r}", ResourceWarning, stacklevel=2, source=self)

    # For the client -----------------------------------------------------------------------------

    @property
    def memory(self) -> RunMemory:
        """The run's bytes. Raises AgentError or InvalidArgument if it has none any more."""
        self._check()
        return self._memory

    def begin_fetch(self) -> None:
        """A fetch into the run is about to be asked for; an older fetch's table must be gone."""
        self.check_idle()
        clear_table(self._memory)
        self._progress = None
        self._is_answered = False
        self._state = _State.FETCHING

    def end_fetch(self) -> None:
        """The agent has said that nothing more comes; a killed worker does not write that."""
        with self._state_lock:
            self._is_answered = True
        self._ring()

    def hand_over(self) -> None:
        """The run is the agent's from now on."""
        self.check_idle()
        with self._state_lock:
            self._state = _State.HANDED_OVER
        self._close_events()

    def begin_offer(self) -> None:
        """The agent is asked to take the run for another engine."""
        self.check_idle()
        with self._state_lock:
            self._state = _State.OFFERING

    def refuse_offer(self) -> None:
        """The agent does not take it: it is the caller's again, or goes back if he has released it
        meanwhile."""
        with self._state_lock:
            is_wanted = self._state is _State.OFFERING
            if is_wanted:
                self._state = _State.LEASED
        if not is_wanted:
            self._give_back(self.number)

    def end_offer(self) -> None:
        """The run is the agent's from now on, until another engine takes it."""
        with self._state_lock:
            self._state = _State.OFFERED
        self._close_events()

    def lose(self, error: AgentError) -> None:
        """The agent is gone; whoever waits is woken."""
        with self._state_lock:
            if self._state in (_State.LEASED, _State.FETCHING, _State.OFFERING):
                self._failure = error
                self._state = _State.LOST
        self._ring()

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(self._failure.socket_path, self._failure.detail)
        if self._state not in (_State.LEASED, _State.FETCHING):
            raise InvalidArgument("run", given=self._state.value, expected="a leased run")

    def check_idle(self) -> None:
        """The agent has answered what was begun with the run."""
        self._check()
        if self._state is _State.FETCHING and not self._is_answered:
            raise InvalidArgument("run", given=self._state.value, expected="no fetch that runs")

    def _ring(self) -> None:
        """Wake whoever waits here, by this process: the reading end is for the agent's news."""
        with self._state_lock, suppress(BlockingIOError):
            if self._sleepers and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._wake_sleepers)
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _close_events(self) -> None:
        """Wake whoever waits, and close the descriptors when nobody looks at them any more."""
        self._ring()
        with self._waiting_lock, self._state_lock:
            if not self._sleepers:
                self._close_descriptors()
                return
            wakeup, self._wakeup = self._wakeup, -1
            self._close_descriptors()
        if wakeup >= 0:
            self._loop.call_soon_threadsafe(self._drop_sleepers, wakeup)

    def _close_descriptors(self) -> None:
        for descriptor in (self._bell, self._wakeup):
            if descriptor >= 0:
                os.close(descriptor)
        self._bell = self._wakeup = -1

    def _drop_sleepers(self, wakeup: int) -> None:
        self._loop.remove_reader(wakeup)
        os.close(wakeup)
        self._wake_sleepers()
