"""Rebuilds lost shards in a pool on a GPU, where the blocks' other shards have just come.

    sections and parity by DMA -> the lost shards out of the others -> their checksums -> the host

Parity takes the bus for a fifth of a block at most; the lost shards never cross it. The checksums
do, 8 bytes each: with those of the other shards, which the agent noted, they say whether the blocks
are what was stored. Until they are there the pass may go on: it is confirmed before anything of it
is published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from erasure.code import Code
from kernels.reference.gf256 import pack_recipe
from kernels.reference.xxh3 import SHORTEST_BYTES, STRIPE_BYTES
from kvstore.client import ArenaRun, BlockLoss, check_rebuilt
from kvstore.errors import StoreError

from ..block_pool import BlockPool
from ..errors import InvalidRequest, TransferFailed
from ..upload import upload
from .block_list import BlockList
from .cuda_streams import make_stream, record
from .cuda_transfer import EventTransfer, all_queued
from .device_errors import transfer_error
from .mover import ComputeMark, SectionMover, Transfer, wait_to_end
from .rebuild import move_parity, move_whole, require_right

NO_SHARD = -1
PATTERNS_KEPT_MAX = 512
"""Ways to lose shards; 10+2 has 65 that a reader meets."""


class CheckedTransfer:
    """An `EventTransfer` behind which something is checked, once; it fails if that fails."""

    def __init__(
        self, transfer: EventTransfer, check: Callable[[], None], behind: Sequence[Transfer] = ()
    ) -> None:
        """`behind`: transfers that it begins behind; each has a deadline of its own."""
        self._transfer = transfer
        self._behind = behind
        self._check: Callable[[], None] | None = check
        self._failure: TransferFailed | None = None

    @property
    def has_ended(self) -> bool:
        """See Transfer."""
        if not self._transfer.has_ended:
            return False
        self._look()
        return True

    def wait(self) -> None:
        """See Transfer."""
        for one in self._behind:
            one.wait()
        self._transfer.wait()
        self._look()

    def order_compute(self) -> None:
        """See Transfer; what is computed then is to be confirmed."""
        self._transfer.order_compute()

    def _look(self) -> None:
        # Two threads that look at one time find the same.
        check = self._check
        if check is not None:
            try:
                check()
            except TransferFailed as error:
                self._failure = error
            self._check = None
        if self._failure is not None:
            raise self._failure


class ShardKernels:
    """Rebuilds lost shards of blocks in a GPU's memory, and hashes them, in a stream of its own.

    Raises InvalidRequest for another device, and for blocks that are not k whole shards;
    ImportError without TileLang.
    """

    def __init__(self, device: torch.device, block_bytes: int, *, k: int, m: int) -> None:
        if device.type != "cuda":
            raise InvalidRequest("rebuild", given=f"a pool on {device}", expected="on a GPU")
        if block_bytes % (k * STRIPE_BYTES):
            expected = f"a multiple of {k} x {STRIPE_BYTES} bytes"
            raise InvalidRequest("block", given=f"{block_bytes} bytes", expected=expected)
        if block_bytes // k < SHORTEST_BYTES:
            expected = f"shards of {SHORTEST_BYTES} bytes or more, which the GPU can hash"
            raise InvalidRequest("shard", given=f"{block_bytes // k} bytes", expected=expected)
        # Here: TileLang is an optional package, and takes seconds to import.
        from kernels.gpu import gf256, xxh3

        self.k = k
        self.m = m
        self.block_bytes = block_bytes
        self.device = device
        self.stream = make_stream(device, -1)
        self._shard_bytes = block_bytes // k
        self._combine_shards = gf256.combine_shards
        self._hash_shards = xxh3.hash_shards

    def queue(
        self,
        pool: torch.Tensor,
        parity: torch.Tensor,
        losses: Sequence[BlockLoss],
        block_ids: NDArray[np.int32],
        behind: Sequence[Transfer],
    ) -> list[torch.Tensor]:
        """Queue it in the current stream; the checksums, which come to the host, and what must live
        until they have.

        `parity`: of `make_parity`. What is rebuilt is rebuilt behind the transfers `behind`, which
        bring it too.
        """
        k, m = self.k, self.m
        blocks = len(losses)
        packed = bytearray(b"".join(pack_loss(k, m, loss.shards) for loss in losses))
        packed_rows = torch.frombuffer(packed, dtype=torch.uint8).view(blocks, -1)
        recipes = upload(packed_rows, self.device)
        wanted = [[*loss.missing, *([NO_SHARD] * (m - len(loss.missing)))] for loss in losses]
        shards = upload(torch.tensor(wanted, dtype=torch.int32), self.device)
        ids = upload(torch.from_numpy(block_ids), self.device)
        for transfer in behind:
            transfer.order_compute()
        self._combine_shards(pool, parity, ids, recipes)
        hashes = self._hash_shards(pool, ids, shards, self._shard_bytes)
        on_host = torch.empty(hashes.shape, dtype=hashes.dtype, pin_memory=True)
        on_host.copy_(hashes, non_blocking=True)
        return [on_host, parity, recipes, shards, ids, hashes]

    def make_parity(self, blocks: int) -> torch.Tensor:
        """Room for the parity shards of so many blocks, uint8 [blocks, m, shard bytes]. Of the
        current stream: what is queued in it before may still use the same memory."""
        shape = (blocks, self.m, self._shard_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def time_rebuild(self, blocks: int, clock: Callable[[], float], rounds: int) -> float:
        """Least seconds, of some rounds, from parity in page-locked memory of the host to checksums
        there, of blocks that have each lost a data shard. Compiles what is not compiled yet."""
        k = self.k
        losses = [
            BlockLoss(at, tuple(k if j == at % k else j for j in range(k)), (0,) * k, 0)
            for at in range(blocks)
        ]
        pool = torch.zeros((blocks, self.block_bytes), dtype=torch.uint8, device=self.device)
        shape = (blocks, self.m, self._shard_bytes)
        on_host = torch.zeros(shape, dtype=torch.uint8, pin_memory=True)
        taken_s = []
        for _ in range(rounds + 1):
            start_s = clock()
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                parity = self.make_parity(blocks)
                parity.copy_(on_host, non_blocking=True)
                self.queue(pool, parity, losses, np.arange(blocks, dtype=np.int32), [])
            self.stream.synchronize()
            taken_s.append(clock() - start_s)
        return min(taken_s[1:])


class GpuRebuilder:
    """A `Rebuilder` for a pool on the kernels' GPU."""

    def __init__(self, pool: BlockPool, mover: SectionMover, kernels: ShardKernels) -> None:
        assert pool.block_bytes == kernels.block_bytes, (pool.block_bytes, kernels.block_bytes)
        self._pool = pool.memory
        self._device = pool.memory.device
        self._mover = mover
        self._kernels = kernels

    def takes(self, k: int, m: int) -> bool:
        """See Rebuilder: the one that its kernels are for."""
        return (k, m) == (self._kernels.k, self._kernels.m)

    def bring(
        self,
        run: ArenaRun,
        keys: Sequence[bytes],
        losses: Sequence[BlockLoss],
        blocks: BlockList,
        *,
        after: ComputeMark = None,
    ) -> Sequence[Transfer]:
        """See Rebuilder."""
        kernels = self._kernels
        assert run.layout.code == (kernels.k, kernels.m), run
        moved = move_whole(self._mover, run, losses, blocks, after)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(kernels.stream):
                parity = kernels.make_parity(len(losses))
                # Behind what is queued here, which may have had that memory before.
                ready = self._mover.mark_compute()
                moved += move_parity(self._mover, run, losses, parity, ready)
                rebuilt = self._rebuild(parity, keys, losses, blocks, moved, ready)
        except BaseException as error:
            # What is queued of it would go on, in memory that its owner gives back.
            under_way = list(moved)
            try:
                under_way += all_queued(self._device, kernels.stream)
            finally:
                wait_to_end(*under_way)
            # An OSError is a kernel's that could not be compiled, unless it is the agent's.
            if isinstance(error, StoreError) or not isinstance(error, RuntimeError | OSError):
                raise
            raise transfer_error(f"rebuild on {self._device}", error) from error
        return [*moved, rebuilt]

    def _rebuild(
        self,
        parity: torch.Tensor,
        keys: Sequence[bytes],
        losses: Sequence[BlockLoss],
        blocks: BlockList,
        moved: Sequence[Transfer],
        ready: ComputeMark,
    ) -> Transfer:
        """In the current stream: behind what was moved, and what was queued there before
        (`ready`)."""
        hashes, *keeps = self._kernels.queue(self._pool, parity, losses, blocks.array, moved)

        def check() -> None:
            found = hashes.numpy().view(np.uint64).tolist()
            rows = [row[: len(loss.missing)] for row, loss in zip(found, losses, strict=True)]
            require_right(check_rebuilt(keys, losses, rows), losses)

        event = record(self._kernels.stream)
        ended = EventTransfer(event, self._device, *keeps, behind=(ready,))
        return CheckedTransfer(ended, check, behind=moved)


@lru_cache(maxsize=PATTERNS_KEPT_MAX)
def pack_loss(k: int, m: int, shards: tuple[int, ...]) -> bytes:
    """The recipe that rebuilds what a block has lost, as `kernels.reference.gf256` says;
    `shards`: of a `BlockLoss`."""
    missing = [place for place, shard in enumerate(shards) if shard != place]
    coefficients = Code(k, m).coefficients(missing, shards)
    return pack_recipe(k, m, shards, missing, coefficients.tolist())
