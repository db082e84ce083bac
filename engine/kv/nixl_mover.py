"""Mover (e): NIXL moves each block's section by itself, with whatever transport it has for the two
memories. With a NIC for RDMA in the host and a pool on a GPU that is GDR: the NIC reads the arena
and writes GPU memory, and neither CPU nor multiprocessors take part.

Both ends are this process (a loop-back): the arena is the local side, the pool the remote one. What
is served by the package alone and what needs a NIC are two questions, see `find_gdr_lacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from threading import Event, Lock
from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from kvstore.layout import BlockLayout

from ..block_pool import BlockPool
from ..errors import MoverUnavailable, TransferFailed, TransferStuck
from .cuda_streams import record
from .mover import ENDED, ComputeMark, Transfer, check_part, wait_to_end
from .pinned import address_of

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
BACKEND = "UCX"
ACTIVE_PORT = "4:"
"""How a port's `state` begins (sysfs of RDMA devices)."""

DEADLINE_S = 30.0
POLL_S = 0.0001
BOUNCE_BYTES = 4 << 20

_numbers = count()


def find_gdr_lacks(system: Path = Path("/sys")) -> list[str]:
    """What this host lacks for a NIC to write into GPU memory; nothing, if it may be tried."""
    states = list((system / "class" / "infiniband").glob("*/ports/*/state"))
    active = [path for path in states if path.read_text().startswith(ACTIVE_PORT)]
    lacks = []
    if not active:
        lacks.append(f"an RDMA port that is active (of {len(states)} in {system}/class/infiniband)")
    if not (system / "module" / "nvidia_peermem").exists():
        lacks.append("the kernel module nvidia_peermem")
    if _find_api() is None:
        lacks.append(f"one of the packages {', '.join(PACKAGES)}")
    return lacks


class NixlMover:
    """See above. Raises MoverUnavailable without the package or its UCX backend.

    `arena` is registered when the first part of it is moved, and any other that the agent comes
    back with. A part of other memory goes through a small buffer.
    """

    name = "nixl"
    step_bytes = 8 << 20

    def __init__(
        self, pool: BlockPool, layout: BlockLayout, *, arena: Callable[[], memoryview | None]
    ) -> None:
        assert pool.block_bytes == layout.block_bytes, (pool.block_bytes, layout)
        api = _find_api()
        if api is None:
            raise MoverUnavailable(self.name, [f"one of the packages {', '.join(PACKAGES)}"])
        # Two agents of one name would take each other's memory for their own.
        self._agent_name = f"cachalot-{next(_numbers)}"
        self._agent = api.nixl_agent(self._agent_name, api.nixl_agent_config(backends=[BACKEND]))
        if BACKEND not in self._agent.backends:
            raise MoverUnavailable(self.name, [f"its backend {BACKEND}"])
        self._arena = arena
        self._pool_address = pool.memory.data_ptr()
        self._pool_memory = "DRAM" if pool.is_host else "VRAM"
        self._device_index = 0 if pool.is_host else pool.memory.device.index
        self._block_bytes, self._capacity = pool.block_bytes, pool.capacity_blocks
        self._widths = [section.bytes for section in layout.sections]
        self._offsets = [sum(self._widths[:index]) for index in range(len(self._widths))]
        self._lock = Lock()
        """An agent is for one thread at a time."""
        self._registered = [self._agent.register_memory(pool.memory, backends=[BACKEND])]
        self._ranges: list[tuple[int, int, memoryview]] = []
        self._bounce_lock = Lock()
        size_bytes = max(BOUNCE_BYTES, *self._widths)
        self._bounce = np.zeros(size_bytes, np.uint8).data
        self._register(self._bounce)

    def mark_compute(self) -> ComputeMark:
        """See SectionMover."""
        if self._pool_memory == "DRAM":
            return None
        return record(torch.cuda.current_stream(self._device_index))

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        """See SectionMover. The calling thread waits for `after`."""
        return self._move("WRITE", part, section, block_ids, after)

    def from_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        """See SectionMover. The calling thread waits for `after`."""
        return self._move("READ", part, section, block_ids, after)

    def close(self) -> None:
        """See SectionMover. Whoever has a transfer waits for it before."""
        with self._lock:
            for registered in self._registered:
                self._agent.deregister_memory(registered, backends=[BACKEND])
            self._registered.clear()
            self._ranges.clear()

    def _move(
        self,
        operation: str,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        after: ComputeMark,
    ) -> Transfer:
        width = self._widths[section]
        blocks = check_part(part, width, block_ids, self._capacity)
        if not len(blocks):
            return ENDED
        if after is not None:
            after.synchronize()
        pool = blocks.array.astype(np.uint64) * np.uint64(self._block_bytes)
        pool += np.uint64(self._pool_address + self._offsets[section])
        if self._is_registered(part):
            return self._start(operation, part, width, pool)
        step = self._bounce.nbytes // width
        rows = np.frombuffer(part, np.uint8).reshape(len(pool), width)
        with self._bounce_lock:
            for first in range(0, len(pool), step):
                some = pool[first : first + step]
                piece = self._bounce[: len(some) * width]
                copied = np.frombuffer(piece, np.uint8).reshape(len(some), width)
                if operation == "WRITE":
                    np.copyto(copied, rows[first : first + step])
                wait_to_end(self._start(operation, piece, width, some))
                if operation == "READ":
                    np.copyto(rows[first : first + step], copied)
        return ENDED

    def _start(self, operation: str, part: memoryview, width: int, pool: np.ndarray) -> Transfer:
        host = np.arange(len(pool), dtype=np.uint64) * np.uint64(width)
        host += np.uint64(address_of(part))
        sizes = np.full(len(pool), width, np.uint64)
        here, there = np.zeros_like(sizes), np.full_like(sizes, self._device_index)
        with self._lock:
            try:
                handle = self._agent.initialize_xfer(
                    operation,
                    self._agent.get_xfer_descs(np.stack([host, sizes, here], axis=1), "DRAM"),
                    self._agent.get_xfer_descs(
                        np.stack([pool, sizes, there], axis=1), self._pool_memory
                    ),
                    self._agent_name,
                    backends=[BACKEND],
                )
                self._agent.transfer(handle)
            except Exception as error:  # the binding has no base class of its own
                raise TransferFailed(f"nixl: {error}") from error
        return _NixlTransfer(self._agent, handle, self._lock, part)

    def _is_registered(self, part: memoryview) -> bool:
        address = address_of(part)
        if self._is_in_range(address, part.nbytes):
            return True
        arena = self._arena()
        if arena is not None:
            start = address_of(arena)
            if start <= address and address + part.nbytes <= start + arena.nbytes:
                self._register(arena)
        return self._is_in_range(address, part.nbytes)

    def _is_in_range(self, address: int, size_bytes: int) -> bool:
        return any(
            start <= address and address + size_bytes <= end for start, end, _ in self._ranges
        )

    def _register(self, memory: memoryview) -> None:
        start = address_of(memory)
        described = [(start, memory.nbytes, 0, "")]
        with self._lock:
            registered = self._agent.register_memory(described, "DRAM", backends=[BACKEND])
            self._registered.append(registered)
            self._ranges.append((start, start + memory.nbytes, memory))


class _Transfers(Protocol):
    """What is asked of NIXL's agent about a transfer."""

    def check_xfer_state(self, handle: object) -> str:
        """PROC, DONE or ERR."""

    def release_xfer_handle(self, handle: object) -> None:
        """It has ended."""


class _NixlTransfer:
    """A `Transfer` that NIXL is asked about."""

    def __init__(self, agent: _Transfers, handle: object, lock: Lock, part: memoryview) -> None:
        self._agent = agent
        self._handle = handle
        self._lock = lock
        self._part: memoryview | None = part
        self._state = "PROC"

    @property
    def has_ended(self) -> bool:
        """See Transfer."""
        with self._lock:
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
                if self._state != "PROC":
                    self._agent.release_xfer_handle(self._handle)
                    self._part = None
        if self._state not in ("PROC", "DONE"):
            raise TransferFailed(f"nixl: a transfer ended as {self._state}")
        return self._state == "DONE"

    def wait(self) -> None:
        """See Transfer."""
        pause = Event()
        for _ in range(round(DEADLINE_S / POLL_S)):
            if self.has_ended:
                return
            pause.wait(POLL_S)
        raise TransferStuck(f"a transfer of nixl has not ended for {DEADLINE_S:.0f} s")

    def order_compute(self) -> None:
        """The calling thread waits: no stream of a GPU knows of a NIC."""
        self.wait()


def _find_api() -> ModuleType | None:
    """The package's module of agents, None if there is none."""
    for name in PACKAGES:
        try:
            return import_module(f"{name}._api")
        except ImportError:
            continue
    return None
