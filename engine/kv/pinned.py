"""Memory of the host that is page-locked: only that can be moved by a GPU without the CPU's help.

The arena belongs to the agent; each engine that maps it locks it for its own process, once, and
again if the agent comes back with another one. Not for memory of the device.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Thread

import numpy as np
import torch

from ..errors import ArenaNotPinned, TransferFailed
from .cuda_runtime import CudaRuntime
from .lock_limits import LockLimits, find_lack, missing_bytes, read_limits

log = logging.getLogger(__name__)

USERS_DEADLINE_S = 60.0
"""Longest time that pages stay locked for a call that is starting a transfer."""


def address_of(part: memoryview) -> int:
    """Where a part of the arena lies in this process."""
    if not part.readonly:  # a tenth of the time that an array takes
        return ctypes.addressof(ctypes.c_char.from_buffer(part))
    address: int = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
    return address


class _Range:
    """Page-locked bytes. `view` keeps them mapped."""

    def __init__(self, view: memoryview, *, is_registered: bool) -> None:
        self.view = view
        self.start = address_of(view)
        self.end = self.start + view.nbytes
        self.is_registered = is_registered
        self.users = 0
        self.on_device: torch.Tensor | None = None


class PinnedMemory:
    """The page-locked ranges of one process, for one device. May be used by several threads."""

    def __init__(self, runtime: CudaRuntime, device: torch.device) -> None:
        self.on_miss: Callable[[], None] = lambda: None
        """Called when a transfer found that its part is not page-locked. Must be short."""
        self._runtime = runtime
        self._device = device
        self._ranges: list[_Range] = []
        self._changed = Condition()

    def adopt(self, memory: torch.Tensor) -> None:
        """Take up memory that PyTorch has page-locked; uint8, contiguous."""
        assert memory.is_pinned(), memory.shape
        with self._changed:
            self._ranges.append(_Range(memory.numpy().data, is_registered=False))

    def pin(self, view: memoryview) -> None:
        """Lock memory that this process has mapped. Raises TransferFailed."""
        new = _Range(view, is_registered=True)
        with torch.cuda.device(self._device):
            self._runtime.register(new.start, view.nbytes)
        with self._changed:
            self._ranges.append(new)

    def unpin(self, view: memoryview) -> None:
        """Let memory go that was given to `pin`, when nothing uses it any more."""
        start = address_of(view)
        with self._changed:
            (old,) = [one for one in self._ranges if one.start == start]
            self._ranges.remove(old)
            self._changed.wait_for(lambda: old.users == 0, USERS_DEADLINE_S)
            assert old.users == 0, "a transfer is being started for a minute"
        # What was started before may still run.
        torch.cuda.synchronize(self._device)
        self._runtime.unregister(old.start)

    @contextmanager
    def use(self, address: int, size_bytes: int) -> Iterator[bool]:
        """Whether the bytes are page-locked; they stay so until the block ends, and until all has
        been done that is queued by then."""
        with self._changed:
            found = self._find(address, size_bytes)
            if found is not None:
                found.users += 1
        if found is None:
            self.on_miss()
        try:
            yield found is not None
        finally:
            if found is not None:
                with self._changed:
                    found.users -= 1
                    self._changed.notify_all()

    def device_rows(self, address: int, rows: int, width: int) -> torch.Tensor:
        """Page-locked bytes as a tensor of the device, uint8 [rows, width]: kernels read and write
        them over the bus. Within `use`."""
        found = self._find(address, rows * width)
        assert found is not None, "not page-locked"
        if found.on_device is None:
            # Here: the folder is for devices, and is asked for nothing where there is none.
            from kernels.gpu.mapped_memory import device_view

            host = torch.frombuffer(found.view, dtype=torch.uint8)
            found.on_device = device_view(host, self._device)
        first = address - found.start
        return found.on_device[first : first + rows * width].view(rows, width)

    def close(self) -> None:
        """Unlock everything; nothing uses it any more. May be called again."""
        with self._changed:
            ranges, self._ranges = self._ranges, []
        torch.cuda.synchronize(self._device)
        for one in ranges:
            if one.is_registered:
                self._runtime.unregister(one.start)

    def _find(self, address: int, size_bytes: int) -> _Range | None:
        for one in self._ranges:
            if one.start <= address and address + size_bytes <= one.end:
                return one
        return None


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
        self._pinned: memoryview | None = None
        self._tried: int | None = None
        """Where the arena lay that was tried last."""
        self._again: Thread | None = None
        memory.on_miss = self._look

    def pin(self) -> None:
        """Lock the arena that there is now. Raises ArenaNotPinned, which `status` tells too."""
        view = self._arena()
        if view is None:
            raise ArenaNotPinned(size_bytes=0, reason="the agent has none, or cannot be reached")
        self._tried = address_of(view)
        try:
            self._pin(view)
        except ArenaNotPinned as error:
            self.status = PinStatus(problem=str(error))
            raise

    def close(self) -> None:
        """Pin nothing any more. What is pinned goes with the memory."""
        self._memory.on_miss = lambda: None
        if self._again is not None:
            self._again.join()

    def _pin(self, view: memoryview) -> None:
        start_s = self._clock()
        size_bytes = view.nbytes
        lack = find_lack(missing_bytes(address_of(view), size_bytes), self._limits())
        if lack is not None:
            raise ArenaNotPinned(size_bytes=size_bytes, reason=lack)
        if self._pinned is not None:
            self._memory.unpin(self._pinned)
            self._pinned = None
        try:
            self._memory.pin(view)
        except TransferFailed as error:
            reason = f"{error}; {self._limits().describe()}"
            raise ArenaNotPinned(size_bytes=size_bytes, reason=reason) from error
        self._pinned = view
        took_s = self._clock() - start_s
        self.status = PinStatus(pinned_bytes=size_bytes, took_s=took_s)
        log.info("arena pinned: %.2f GiB in %.2f s", size_bytes / 2**30, took_s)

    def _look(self) -> None:
        """A part was not page-locked: is there another arena? One that was tried is left alone."""
        view = self._arena()
        if view is None or address_of(view) == self._tried:
            return
        if self._again is not None and self._again.is_alive():
            return
        self._tried = address_of(view)
        self._again = Thread(target=self._pin_again, args=(view,), name="arena-pin", daemon=True)
        self._again.start()

    def _pin_again(self, view: memoryview) -> None:
        try:
            self._pin(view)
        except ArenaNotPinned as error:
            self.status = PinStatus(problem=str(error))
            log.warning("%s; blocks go through a small buffer", error)
