"""Memory of the host that is page-locked: only that can be moved by a GPU without the CPU's help.

The arena belongs to the agent; each engine that maps it locks it for its own process, once, and
again if the agent comes back with another one. Not for memory of the device.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition, Lock, Thread

import numpy as np
import torch

from ..errors import ArenaNotPinned, DeviceLost, TransferFailed, TransferStuck
from .cuda_runtime import CudaRuntime
from .lock_limits import LockLimits, find_lack, missing_bytes, read_limits
from .mover import first_line, left_behind

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""Between two tries to lock an arena for which the host has no room, or to let go of the one
before."""

USERS_DEADLINE_S = 60.0
"""Longest time that pages stay locked for a call that is starting a transfer."""

DEVICE_DEADLINE_S = 30.0
"""Longest wait for what a device has been given to do, before its pages are tried again. Transfers
take milliseconds, passes that are queued beside them may take longer."""


def address_of(part: memoryview) -> int:
    """Where a part of the arena lies in this process."""
    if not part.readonly:  # a tenth of the time that an array takes
        return ctypes.addressof(ctypes.c_char.from_buffer(part))
    address: int = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
    return address


class PinnedRange:
    """Page-locked bytes. `view` is its own, so that they stay mapped, and their address is no other
    memory's, as long as they are locked: whoever had mapped them may have let go."""

    def __init__(self, view: memoryview, *, is_registered: bool) -> None:
        self.view = view[:]
        self.start = address_of(view)
        self.end = self.start + view.nbytes
        self.is_registered = is_registered
        self.users = 0
        self._on_device: torch.Tensor | None = None

    def device_rows(
        self, address: int, rows: int, width: int, device: torch.device
    ) -> torch.Tensor:
        """Some of the bytes as a tensor of the device, uint8 [rows, width]: kernels read and write
        them over the bus. While the range is in use."""
        if self._on_device is None:
            # Here: the folder is for devices, and is asked for nothing where there is none.
            from kernels.gpu.mapped_memory import device_view

            host = torch.frombuffer(self.view, dtype=torch.uint8)
            self._on_device = device_view(host, device)
        first = address - self.start
        return self._on_device[first : first + rows * width].view(rows, width)


class PinnedMemory:
    """The page-locked ranges of one process, for one device. May be used by several threads."""

    def __init__(
        self,
        runtime: CudaRuntime,
        device: torch.device,
        *,
        device_deadline_s: float = DEVICE_DEADLINE_S,
    ) -> None:
        self._device_deadline_s = device_deadline_s
        self.on_miss: Callable[[], None] = lambda: None
        """Called when a transfer found that its part is not page-locked. Must be short."""
        self._runtime = runtime
        self._device = device
        self._ranges: list[PinnedRange] = []
        self._let_go: list[PinnedRange] = []
        """Not used any more, and still locked: `unpin` has failed."""
        self._is_closed = False
        self._changed = Condition()

    def adopt(self, memory: torch.Tensor) -> PinnedRange:
        """Take up memory that PyTorch has page-locked; uint8, contiguous."""
        assert memory.is_pinned(), memory.shape
        return self._add(PinnedRange(memory.numpy().data, is_registered=False))

    def pin(self, view: memoryview) -> PinnedRange:
        """Lock memory that this process has mapped. Raises TransferFailed."""
        new = PinnedRange(view, is_registered=True)
        self._runtime.register(new.start, view.nbytes, self._device)
        return self._add(new)

    def unpin(self, old: PinnedRange) -> None:
        """Let a range go when nothing uses it any more. Raises TransferFailed: it is then still
        locked, and not used; try again, or have `close` do it."""
        with self._changed:
            (self._ranges if old in self._ranges else self._let_go).remove(old)
            is_unused = self._changed.wait_for(lambda: old.users == 0, USERS_DEADLINE_S)
        try:
            if not is_unused:
                raise TransferStuck("a transfer is being started for a minute")
            # What was started before may still run.
            self._wait_for_device()
            if old.is_registered:
                self._runtime.unregister(old.start)
        except TransferFailed:
            with self._changed:
                if self._is_closed:
                    left_behind.append(old)
                else:
                    self._let_go.append(old)
            raise

    def disown(self, old: PinnedRange) -> None:
        """Let go of memory of PyTorch's that was adopted and that nothing uses any more."""
        assert not old.is_registered
        with self._changed:
            if old in self._ranges:
                self._ranges.remove(old)

    def use(self, address: int, size_bytes: int) -> _Use:
        """For a `with` block: the page-locked range of some bytes, None if they are not; it stays
        until the block ends, and until all has been done that is queued by then."""
        return _Use(self, address, size_bytes)

    def _take(self, address: int, size_bytes: int) -> PinnedRange | None:
        with self._changed:
            found = self._find(address, size_bytes)
            if found is not None:
                found.users += 1
        if found is None:
            self.on_miss()
        return found

    def _give_back(self, used: PinnedRange) -> None:
        with self._changed:
            used.users -= 1
            if used.users == 0:
                self._changed.notify_all()

    def close(self) -> None:
        """Unlock everything; nothing uses it any more. What a device that hangs or is lost keeps
        locked is left behind, which the log tells. May be called again."""
        with self._changed:
            self._is_closed = True
            ranges = [*self._let_go, *self._ranges]
            self._let_go, self._ranges = [], []
        try:
            self._wait_for_device()
            while ranges:
                if ranges[-1].is_registered:
                    self._runtime.unregister(ranges[-1].start)
                ranges.pop()
        except TransferFailed as error:
            left_behind.extend(ranges)
            size_bytes = sum(one.view.nbytes for one in ranges)
            log.error("%d bytes stay page-locked until the process ends: %s", size_bytes, error)

    def _wait_for_device(self) -> None:
        """Until all has been done that is queued by now. Raises TransferStuck, TransferFailed."""
        outcome: Future[None] = Future()

        def wait() -> None:
            try:
                self._runtime.synchronize(self._device)
            except TransferFailed as error:
                outcome.set_exception(error)
            except RuntimeError as error:  # PyTorch's, of a device that is lost
                outcome.set_exception(DeviceLost(f"{self._device}: {first_line(error)}"))
            else:
                outcome.set_result(None)

        # CUDA's own wait has no deadline.
        Thread(target=wait, name="device-wait", daemon=True).start()
        try:
            outcome.result(self._device_deadline_s)
        except TimeoutError:
            waited_s = self._device_deadline_s
            raise TransferStuck(f"{self._device} has not ended for {waited_s:.0f} s") from None

    def _add(self, new: PinnedRange) -> PinnedRange:
        with self._changed:
            self._ranges.append(new)
        return new

    def _find(self, address: int, size_bytes: int) -> PinnedRange | None:
        for one in self._ranges:
            if one.start <= address and address + size_bytes <= one.end:
                return one
        return None


class _Use:
    """See `PinnedMemory.use`. A class: it is entered for every section, and a generator takes three
    times as long."""

    __slots__ = ("_address", "_memory", "_size_bytes", "_used")

    def __init__(self, memory: PinnedMemory, address: int, size_bytes: int) -> None:
        self._memory, self._address, self._size_bytes = memory, address, size_bytes
        self._used: PinnedRange | None = None

    def __enter__(self) -> PinnedRange | None:
        self._used = self._memory._take(self._address, self._size_bytes)
        return self._used

    def __exit__(self, *_: object) -> None:
        if self._used is not None:
            self._memory._give_back(self._used)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinStatus:
    """Of the arena: how much is page-locked, and how long that took; or why it is not."""

    pinned_bytes: int = 0
    took_s: float = 0.0
    problem: str | None = None


class ArenaPin:
    """Keeps the arena of an agent page-locked, whichever it is. Close it before the memory."""

    def __init__(
        self,
        arena: Callable[[], memoryview | None],
        memory: PinnedMemory,
        *,
        clock: Callable[[], float],
        limits: Callable[[], LockLimits] = read_limits,
    ) -> None:
        """`arena`: of the agent's client, None as long as there is none."""
        self.status = PinStatus(problem="there is no arena yet")
        self._arena = arena
        self._memory = memory
        self._clock = clock
        self._limits = limits
        self._pinned: PinnedRange | None = None
        self._old: PinnedRange | None = None
        """Of the arena before, which could not be let go of yet."""
        self._tried: memoryview | None = None
        """The arena that was tried last. Held: its address is then no other one's."""
        self._tried_at_s = clock()
        self._again: Thread | None = None
        self._lock = Lock()
        memory.on_miss = self._look

    def pin(self) -> None:
        """Lock the arena that there is now. Raises ArenaNotPinned, which `status` tells too."""
        view = self._arena()
        if view is None:
            raise ArenaNotPinned(size_bytes=0, reason="the agent has none, or cannot be reached")
        self._tried, self._tried_at_s = view, self._clock()
        try:
            self._pin(view)
        except ArenaNotPinned as error:
            self.status = PinStatus(problem=str(error))
            raise

    def close(self) -> None:
        """Pin nothing any more. What is pinned goes with the memory."""
        self._memory.on_miss = lambda: None
        if self._again is not None:
            self._again.join(USERS_DEADLINE_S)
            if self._again.is_alive():
                log.error("the arena is still being page-locked; that thread is left behind")

    def _pin(self, view: memoryview) -> None:
        start_s = self._clock()
        size_bytes = view.nbytes
        try:
            # First: as long as it is mapped its pages are there, and the host has room for one.
            self._let_go()
            lack = find_lack(missing_bytes(address_of(view), size_bytes), self._limits())
            if lack is not None:
                raise ArenaNotPinned(size_bytes=size_bytes, reason=lack)
            self._pinned = self._memory.pin(view)
        except TransferFailed as error:
            reason = f"{error}; {self._limits().describe()}"
            raise ArenaNotPinned(size_bytes=size_bytes, reason=reason) from error
        took_s = self._clock() - start_s
        self.status = PinStatus(pinned_bytes=size_bytes, took_s=took_s)
        log.info("arena pinned: %.2f GiB in %.2f s", size_bytes / 2**30, took_s)

    def _let_go(self) -> None:
        """Of the arena that is locked, and of its mapping: the range holds on to it, and when this
        returns nothing has the range. Raises TransferFailed; the next try begins with it again."""
        if self._pinned is not None:
            self._old, self._pinned = self._pinned, None
            self.status = PinStatus(problem="the arena is gone, another one is being locked")
        if self._old is not None:
            self._memory.unpin(self._old)
            self._old = None

    def _look(self) -> None:
        """A part was not page-locked: is there another arena? One that could not be locked is tried
        again after a while."""
        view = self._arena()
        if view is None:
            return
        with self._lock:
            if self._again is not None and self._again.is_alive():
                return
            is_same = self._tried is not None and address_of(view) == address_of(self._tried)
            is_early = self._clock() - self._tried_at_s < RETRY_S
            if is_same and (self._pinned is not None or is_early):
                return
            self._tried, self._tried_at_s = view, self._clock()
            self._again = Thread(
                target=self._pin_again, args=(view,), name="arena-pin", daemon=True
            )
            self._again.start()

    def _pin_again(self, view: memoryview) -> None:
        try:
            self._pin(view)
        except ArenaNotPinned as error:
            self.status = PinStatus(problem=str(error))
            log.warning("%s; blocks go through a small buffer", error)
