"""Blocks of several sections, an arena with runs in it, and a pool of real workers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.agent.jobs import FetchJob, StoreJob
from kvstore.agent.worker_process import WorkerCommand
from kvstore.agent.workers import WorkerPool
from kvstore.arena.region import ArenaRegion, RunMemory
from kvstore.arena.run_layout import RunLayout
from kvstore.arena.wakeup import make_wakeup
from kvstore.client import BlockLayout, Namespace, Section, StoreClient, saving
from kvstore.layout import BLOCK_TOKENS
from tests.patience import PATIENCE_S

V41_SECTIONS = (22_784, 22_784, 22_784, 45_568)
ARENA_BYTES = 64 << 20
PATIENT_WORKER = """
import sys
from kvstore.agent import worker
from kvstore.client import batch_save, saving
from tests.patience import PATIENCE_S

saving.INQUIRY_DEADLINE_S = batch_save.SILENT_S = batch_save.STRAGGLER_WAIT_S = PATIENCE_S
sys.exit(worker.main())
"""
"""A worker that waits for nodes however slow they are: no block fails because they are."""


class SectionedBlocks:
    """`count` blocks of one chain. Equal seeds give equal keys and equal bytes."""

    def __init__(self, count: int, *, sections: Sequence[int] = V41_SECTIONS, seed: int) -> None:
        rng = np.random.default_rng(seed)
        named = tuple(Section(f"s{index}", size) for index, size in enumerate(sections))
        layout = BlockLayout(sections=named)
        self.namespace = Namespace(model="runs", weights="r1", tokenizer="t1", layout=layout)
        tokens = rng.integers(0, 1 << 16, count * BLOCK_TOKENS, dtype=np.int32)
        self.keys = self.namespace.block_keys(tokens)
        self.blocks: NDArray[np.uint8] = rng.integers(
            0, 256, (count, layout.block_bytes), dtype=np.uint8
        )

    @property
    def count(self) -> int:
        return len(self.keys)

    async def save(self, client: StoreClient) -> None:
        """Save all blocks without any agent, however slowly nodes say which of them they have."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving, "INQUIRY_DEADLINE_S", PATIENCE_S)
            result = await client.save(self.namespace, self.keys, list(self.blocks))
        assert result.failed == 0, result

    def section(self, section: int, first: int, end: int) -> NDArray[np.uint8]:
        """That section of blocks [first, end), one after the other: as a run has it."""
        sections = self.namespace.layout.sections
        start = sum(one.bytes for one in sections[:section])
        return self.blocks[first:end, start : start + sections[section].bytes].reshape(-1)


class ArenaRun:
    """A run in an arena, with both ends of its wake-ups."""

    def __init__(
        self, blocks: SectionedBlocks, region: ArenaRegion, offset: int, size: int
    ) -> None:
        self.blocks = blocks
        self.offset = offset
        self.memory: RunMemory = region.run(offset, RunLayout(blocks.namespace.layout, size))
        self.waker, self.wakeup = make_wakeup()

    def fill(self) -> None:
        """All blocks, as an engine would leave them there."""
        for number in range(len(self.blocks.namespace.layout.sections)):
            area = np.frombuffer(self.memory.section(number), np.uint8)
            content = self.blocks.section(number, 0, self.blocks.count)
            area[: len(content)] = content

    def holds(self, count: int, *, first: int = 0) -> bool:
        """Whether the run's first `count` blocks are the chain's from `first` on, byte by byte."""
        for number in range(len(self.blocks.namespace.layout.sections)):
            expected = self.blocks.section(number, first, first + count)
            found = np.frombuffer(self.memory.section(number), np.uint8)[: len(expected)]
            if not np.array_equal(found, expected):
                return False
        return True

    def wakes(self) -> int:
        """Wake-ups since the last call, as many as there is room for."""
        try:
            return len(os.read(self.wakeup, 1 << 16))
        except BlockingIOError:
            return 0

    def fetch_job(
        self,
        *,
        first_block: int = 0,
        keys: bytes | None = None,
        run_offset: int | None = None,
        is_by_layer: bool = False,
        deadline_s: float = 10.0,
        owner: int = 1,
    ) -> FetchJob:
        """The whole chain, where nothing else is said."""
        return FetchJob(
            owner=owner,
            namespace=self.blocks.namespace,
            keys=b"".join(self.blocks.keys) if keys is None else keys,
            first_block=first_block,
            run_offset=self.offset if run_offset is None else run_offset,
            run_blocks=self.memory.layout.blocks,
            is_by_layer=is_by_layer,
            deadline_s=deadline_s,
        )

    def store_job(
        self,
        *,
        first_block: int = 0,
        run_offset: int | None = None,
        ttl_class: str = "chat",
        deadline_s: float = 10.0,
    ) -> StoreJob:
        """The whole chain, where nothing else is said."""
        return StoreJob(
            owner=1,
            namespace=self.blocks.namespace,
            keys=b"".join(self.blocks.keys),
            first_block=first_block,
            run_offset=self.offset if run_offset is None else run_offset,
            run_blocks=self.memory.layout.blocks,
            ttl_class=ttl_class,
            deadline_s=deadline_s,
        )


class Arena:
    """An arena whose runs are handed out one after the other and never taken back."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.region = ArenaRegion(descriptor)
        self.runs: list[ArenaRun] = []
        self._end = 0

    def run(self, blocks: SectionedBlocks, size: int | None = None) -> ArenaRun:
        run = ArenaRun(blocks, self.region, self._end, size or blocks.count)
        self._end += run.memory.layout.run_bytes
        self.runs.append(run)
        return run


@contextmanager
def new_arena(size_bytes: int = ARENA_BYTES) -> Iterator[Arena]:
    descriptor = ArenaRegion.create(size_bytes)
    arena = Arena(descriptor)
    try:
        yield arena
    finally:
        for run in arena.runs:
            run.waker.close()
            os.close(run.wakeup)
        arena.runs.clear()
        arena.region.close()
        os.close(descriptor)


@asynccontextmanager
async def running_pool(
    cluster_path: Path | str, arena: Arena, *, workers: int = 1, has_store: bool = False
) -> AsyncIterator[WorkerPool]:
    """A pool whose workers have started; checks that no exception escaped into the loop.

    Its workers are patient with nodes: what becomes of those that are slow is not its matter.
    """
    loop = asyncio.get_running_loop()
    escaped: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: escaped.append(context))
    pool = WorkerPool(
        cluster_path=Path(cluster_path),
        arena=arena.descriptor,
        fetch_workers=workers,
        has_store_worker=has_store,
        loop=loop,
        clock=time.monotonic,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerCommand, "words", _patient_words)
        await pool.start()
        try:
            yield pool
        finally:
            await pool.stop(5.0)
    assert not escaped


_WORDS = WorkerCommand.words


def _patient_words(command: WorkerCommand, channel: int) -> list[str]:
    python, _, _, *words = _WORDS(command, channel)
    return [python, "-c", PATIENT_WORKER, *words]


def workers_of(pool: WorkerPool, kind: str = "fetch") -> list[dict[str, Any]]:
    """What the pool says of its workers."""
    found: list[dict[str, Any]] = pool.describe()[kind]["workers"]
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process that is not only waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
