"""Mover (e): NIXL moves each block's section by itself, with whatever transport it has for the two
memories. With a NIC for RDMA in the host and a pool on a GPU that is GDR: the NIC reads the arena
and writes GPU memory, and neither CPU nor multiprocessors take part.

Both ends are this process (a loop-back): the arena is the local side, the pool the remote one. What
is served by the package alone and what needs a NIC are two questions, see `find_gdr_lacks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from threading import Lock
from types import ModuleType

import numpy as np
import torch

from kvstore.layout import BlockLayout

from ..block_pool import BlockPool
from ..errors import MoverUnavailable, TransferFailed
from .bounce import move_by_bounce
from .cuda_streams import make_stream, mark_current
from .device_errors import transfer_error
from .lock_limits import LockLimits, find_memlock_lack
from .mover import (
    ENDED,
    ComputeMark,
    Transfer,
    check_copy,
    check_part,
    left_behind,
    wait_at_close,
    wait_for_compute,
)
from .nixl_transfer import NixlTransfer, in_words
from .pinned import RETRY_S, address_of

log = logging.getLogger(__name__)

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
BACKEND = "UCX"
ACTIVE_PORT = "4:"
"""How a port's `state` begins (sysfs of RDMA devices)."""

BOUNCE_BYTES = 4 << 20
"""For each direction."""
COPY = "nixl: a copy"
"""What the log calls it."""

_numbers = count()


def find_gdr_lacks(arena_bytes: int, limits: LockLimits, system: Path = Path("/sys")) -> list[str]:
    """What this host lacks for a NIC to read an arena of so many bytes and to write into GPU
    memory; nothing, if it may be tried."""
    states = _read_port_states(system)
    lacks = []
    if not any(state.startswith(ACTIVE_PORT) for state in states):
        lacks.append(f"an RDMA port that is active (of {len(states)} in {system}/class/infiniband)")
    # UCX says nothing of memory that a NIC did not take: it goes other ways, which are slow.
    memlock_lack = find_memlock_lack(arena_bytes, limits)
    if memlock_lack is not None:
        lacks.append(f"memory to lock: {memlock_lack}")
    if not (system / "module" / "nvidia_peermem").exists():
        lacks.append("the kernel module nvidia_peermem")
    if find_api() is None:
        lacks.append(f"one of the packages {', '.join(PACKAGES)}")
    return lacks


def _read_port_states(system: Path) -> list[str]:
    """Of all RDMA ports; one that goes away meanwhile has none, or is not there."""
    states = []
    with suppress(OSError):
        for path in (system / "class" / "infiniband").glob("*/ports/*/state"):
            state = ""
            with suppress(OSError):
                state = path.read_text()
            states.append(state)
    return states


class NixlMover:
    """See above. Raises MoverUnavailable without the package or its UCX backend, and if that does
    not take the memory of the pool, or of the arena that there is.

    Any other arena that the agent comes back with is registered when the first part of it is moved.
    A part of other memory goes through a small buffer, as do those of an arena that cannot be
    registered, which is tried again after a while.
    """

    name = "nixl"
    step_bytes = 8 << 20

    def __init__(
        self,
        pool: BlockPool,
        layout: BlockLayout,
        *,
        arena: Callable[[], memoryview | None],
        clock: Callable[[], float],
        lent: memoryview | None = None,
        api: ModuleType | None = None,
    ) -> None:
        """`lent`: other memory that is registered too, until `forget`. `api`: the package's module
        of agents; None looks for it."""
        assert pool.block_bytes == layout.block_bytes, (pool.block_bytes, layout)
        api = find_api() if api is None else api
        if api is None:
            raise MoverUnavailable(self.name, [f"one of the packages {', '.join(PACKAGES)}"])
        self._arena = arena
        self._clock = clock
        self._refused: memoryview | None = None
        """The arena that could not be registered. Held: its address is then no other one's."""
        self._again_at_s = 0.0
        self._pool = pool.memory
        self._pool_memory = "DRAM" if pool.is_host else "VRAM"
        self._device_index = 0 if pool.is_host else pool.memory.device.index
        self._copies = None if pool.is_host else make_stream(pool.memory.device)
        self._block_bytes, self._capacity = pool.block_bytes, pool.capacity_blocks
        self._widths = [section.bytes for section in layout.sections]
        self._offsets = [sum(self._widths[:index]) for index in range(len(self._widths))]
        self._lock = Lock()
        """An agent is for one thread at a time."""
        self._of_pool: list[object] = []
        """What the package gave for the memory of the pool."""
        self._ranges: list[_Range] = []
        self._under_way: set[NixlTransfer] = set()
        self._is_closed = False
        half = max(BOUNCE_BYTES, *self._widths)
        self._bounce = np.zeros(2 * half, np.uint8).data
        self._bounces = {
            "WRITE": (Lock(), self._bounce[:half]),
            "READ": (Lock(), self._bounce[half:]),
        }
        # Two agents of one name would take each other's memory for their own.
        self._agent_name = f"cachalot-{next(_numbers)}"
        try:
            with in_words("an agent"):
                config = api.nixl_agent_config(backends=[BACKEND])
                self._agent = api.nixl_agent(self._agent_name, config)
            if BACKEND not in self._agent.backends:
                raise MoverUnavailable(self.name, [f"its backend {BACKEND}"])
            with in_words("the memory of the pool"):
                self._of_pool.append(self._agent.register_memory(pool.memory, backends=[BACKEND]))
            for memory in (self._bounce, lent, arena()):
                if memory is not None:
                    self._register(memory)
        except TransferFailed as error:
            self._deregister_all()
            raise MoverUnavailable(self.name, [str(error)]) from error

    def mark_compute(self) -> ComputeMark:
        """See SectionMover."""
        return mark_current(self._pool.device)

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

    def copy_in(
        self, part: memoryview, target: torch.Tensor, *, after: ComputeMark = None
    ) -> Transfer:
        """See SectionMover. Not by NIXL: memory that is used once is not worth registering. The
        calling thread waits for all of it."""
        check_copy(part, target, self._pool.device)
        if part.nbytes:
            self._copy(target.view(-1), torch.from_numpy(np.frombuffer(part, np.uint8)), after)
        return ENDED

    def copy_out(
        self, source: torch.Tensor, part: memoryview, *, after: ComputeMark = None
    ) -> Transfer:
        """As `copy_in`."""
        check_copy(part, source, self._pool.device)
        if part.nbytes:
            self._copy(torch.from_numpy(np.frombuffer(part, np.uint8)), source.view(-1), after)
        return ENDED

    def _copy(self, target: torch.Tensor, source: torch.Tensor, after: ComputeMark) -> None:
        wait_for_compute(after, COPY)
        try:
            with self._beside_passes():
                target.copy_(source)
        except RuntimeError as error:
            raise transfer_error(COPY, error) from error

    def _beside_passes(self) -> AbstractContextManager[object]:
        """The stream of threads that have none is that of the passes."""
        if self._copies is None:
            return nullcontext()
        return torch.cuda.stream(self._copies)

    def close(self) -> None:
        """See SectionMover. Memory that a NIC may still read or write stays registered."""
        with self._lock:
            self._is_closed = True
            under_way = list(self._under_way)
        if wait_at_close(under_way, self.name, self):
            with self._lock:
                self._deregister_all()

    def forget(self, lent: memoryview) -> None:
        """Let go of memory that was lent, which nothing is moved from or to any more."""
        with self._lock:
            self._drop([one for one in self._ranges if one.view is lent])

    def _deregister_all(self) -> None:
        self._drop(list(self._ranges))
        while self._of_pool:
            self._deregister(self._of_pool.pop(), self._pool)

    def _drop(self, ranges: Sequence[_Range]) -> None:
        for one in ranges:
            self._ranges.remove(one)
            self._deregister(one.registered, one.view)

    def _deregister(self, registered: object, memory: object) -> None:
        try:
            with in_words("memory that is to be deregistered"):
                self._agent.deregister_memory(registered, backends=[BACKEND])
        except TransferFailed as error:
            left_behind.append((self._agent, registered, memory))
            log.error("%s; it stays registered until the process ends", error)

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
        # No NIC knows of the streams of a GPU.
        wait_for_compute(after, "nixl: a transfer")
        pool = blocks.array.astype(np.uint64) * np.uint64(self._block_bytes)
        pool += np.uint64(self._pool.data_ptr() + self._offsets[section])
        transfer = self._start_if_registered(operation, part, width, pool)
        if transfer is not None:
            return transfer

        def start(piece: memoryview, first: int, end: int) -> Transfer:
            with self._lock:
                return self._start(operation, piece, width, pool[first:end])

        lock, bounce = self._bounces[operation]
        with lock:
            move_by_bounce(bounce, part, width, start, is_in=operation == "WRITE")
        return ENDED

    def _start_if_registered(
        self, operation: str, part: memoryview, width: int, pool: np.ndarray
    ) -> Transfer | None:
        """None for memory that is not of an arena that is registered. That is looked at and the
        transfer started under one hold of the lock: between two another thread may let go of an
        arena."""
        with self._lock:
            if self._is_in_range(part):
                return self._start(operation, part, width, pool)
        arena = self._arena()
        if arena is None or not _has(arena, part):
            return None
        with self._lock:
            self._check_open()
            # Nor has another thread registered it.
            if not self._is_in_range(part) and not self._register_arena(arena):
                return None
            return self._start(operation, part, width, pool)

    def _register_arena(self, arena: memoryview) -> bool:
        """False if it cannot be; then not again for a while. With the lock held."""
        now_s = self._clock()
        is_same = self._refused is not None and address_of(arena) == address_of(self._refused)
        if is_same and now_s < self._again_at_s:
            return False
        self._drop_other_arenas()
        try:
            self._register(arena)
        except TransferFailed as error:
            log.warning("%s; blocks go through a small buffer", error)
            self._refused, self._again_at_s = arena, now_s + RETRY_S
            return False
        self._refused = None
        return True

    def _start(self, operation: str, part: memoryview, width: int, pool: np.ndarray) -> Transfer:
        """With the lock held."""
        self._check_open()
        host = np.arange(len(pool), dtype=np.uint64) * np.uint64(width)
        host += np.uint64(address_of(part))
        sizes = np.full(len(pool), width, np.uint64)
        here, there = np.zeros_like(sizes), np.full_like(sizes, self._device_index)
        with in_words("a transfer"):
            handle = self._agent.initialize_xfer(
                operation,
                self._agent.get_xfer_descs(np.stack([host, sizes, here], axis=1), "DRAM"),
                self._agent.get_xfer_descs(
                    np.stack([pool, sizes, there], axis=1), self._pool_memory
                ),
                self._agent_name,
                backends=[BACKEND],
            )
            transfer = NixlTransfer(self._agent, handle, self._lock, self._under_way, part)
        # From here on it is the transfer that tells what became of it, also if it cannot begin.
        transfer.begin()
        return transfer

    def _is_in_range(self, part: memoryview) -> bool:
        """With the lock held."""
        address = address_of(part)
        return any(
            one.start <= address and address + part.nbytes <= one.start + one.view.nbytes
            for one in self._ranges
        )

    def _drop_other_arenas(self) -> None:
        """An agent that came back has another one; the pages of the one before are held until it is
        deregistered. Not beside a transfer, which may be in it: then by the next one, or at the
        end. With the lock held."""
        if not self._under_way:
            self._drop([one for one in self._ranges if one.view is not self._bounce])

    def _register(self, memory: memoryview) -> None:
        """With the lock held, once the mover is made."""
        start = address_of(memory)
        described = [(start, memory.nbytes, 0, "")]
        with in_words(f"{memory.nbytes} bytes of the host"):
            registered = self._agent.register_memory(described, "DRAM", backends=[BACKEND])
        self._ranges.append(_Range(start, memory, registered))

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferFailed("nixl: the mover is closed")


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """Registered memory of the host. The view keeps it mapped as long as it is."""

    start: int
    view: memoryview
    registered: object


def _has(memory: memoryview, part: memoryview) -> bool:
    start, address = address_of(memory), address_of(part)
    return start <= address and address + part.nbytes <= start + memory.nbytes


def find_api() -> ModuleType | None:
    """The package's module of agents, None if there is none."""
    for name in PACKAGES:
        try:
            return import_module(f"{name}._api")
        except ImportError:
            continue
    return None
