"""Blocks that have lost shards come into the pool whole, or it is said that they did not."""

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy as copy_of
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from engine.block_pool import BlockPool
from engine.errors import RebuiltWrong, TransferFailed
from engine.kv.block_list import BlockList
from engine.kv.cuda_rebuild import GpuRebuilder, ShardKernels, pack_loss
from engine.kv.cuda_runtime import open_runtime
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import ENDED, ComputeMark, Transfer, wait_to_end
from engine.kv.pinned import PinnedMemory, address_of
from engine.kv.rebuild import Rebuilder, move_parity
from engine.kv.rebuild_choice import (
    RebuildTimes,
    choose_is_reader,
    find_rebuilder,
    time_on_host,
)
from engine.kv.section_kernels import TorchKernels
from engine.kv.staged_mover import StagedMover
from engine.sources.agent_source import AgentSource
from engine.sources.load import ThreadedLoad
from engine.sources.run_swap import RunSwap, cut_between
from engine.sources.threaded_source import LoadLimits
from engine.store_faults import StoreFaults
from engine.work_threads import WorkThreads
from kernels.reference.gf256 import combine_shards
from kernels.reference.xxh3 import hash_shards
from kvstore.admin.local_cluster import LocalCluster
from kvstore.arena.region import RunMemory
from kvstore.client import (
    AgentClient,
    ArenaRun,
    BlockingAgentClient,
    BlockLayout,
    BlockLoss,
    Section,
    check_rebuilt,
)
from kvstore.client.health import BACKOFF_MAX_S
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import HitPlan
from tests.engine.kv.counting_rebuilder import CountingRebuilder
from tests.engine.kv.delayed_mover import DelayedMover
from tests.engine.kv.host_rebuilder import HostRebuilder
from tests.engine.kv.lost_shards import LostRun, data_losses
from tests.engine.stored_prompt import StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until
from tests.kvstore.agent.agent_process import AgentProcess
from tests.kvstore.run_rebuild import rebuild_in_run

WHOLE = BlockLayout((Section("a", 2_560), Section("b", 5_120), Section("c", 5_120)))
"""Ten shards of 1,280 bytes, of which a section has 2, 4 and 4."""
RAGGED = BlockLayout((Section("a", 513), Section("b", 1), Section("c", 11_831)))
"""12,345 bytes: the last shard reaches over the block's end."""
LOSSES = [(), *data_losses(10, 2), ()]
PATIENT = LoadLimits(match_deadline_s=20.0, fetch_deadline_s=20.0, section_wait_s=20.0)


def bring(run: LostRun, pool: BlockPool, ids: Sequence[int]) -> None:
    """Bring what the run's blocks have lost into rows of the pool."""
    lost = run.blocks_lost
    rebuilder = HostRebuilder(MemcpyMover(pool, run.layout.layout))
    keys = [run.keys[loss.block] for loss in lost]
    blocks = BlockList([ids[loss.block] for loss in lost])
    wait_to_end(*rebuilder.bring(cast("ArenaRun", run), keys, lost, blocks))


@pytest.mark.parametrize("layout", [WHOLE, RAGGED], ids=["whole", "ragged"])
def test_blocks_are_what_was_stored_whatever_they_have_lost(
    layout: BlockLayout, rng: Random
) -> None:
    run = LostRun(layout, LOSSES, rng, k=10, m=2)
    assert len(run.blocks_lost) == 10 + 45 + 20
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=2 * len(LOSSES))
    ids = rng.sample(range(pool.capacity_blocks), len(LOSSES))
    bring(run, pool, ids)
    for loss in run.blocks_lost:
        assert pool.memory[ids[loss.block]].numpy().tobytes() == run.contents[loss.block]


def test_rows_of_a_pool_are_rebuilt_by_recipes_of_the_same_losses(rng: Random) -> None:
    """What a GPU does, by the references of its kernels."""
    run = LostRun(WHOLE, LOSSES[1:-1], rng, k=10, m=2)
    lost, count = run.blocks_lost, run.layout.blocks
    pool = BlockPool(block_bytes=WHOLE.block_bytes, capacity_blocks=count)
    mover = MemcpyMover(pool, WHOLE)
    for section in range(3):
        mover.to_pool(run.section(section), section, range(count))
    parity = torch.frombuffer(run.parity(0, count), dtype=torch.uint8).view(count, 2, -1)
    recipes = bytearray(b"".join(pack_loss(10, 2, loss.shards) for loss in lost))
    ids = torch.arange(count, dtype=torch.int32)
    on_device = torch.frombuffer(recipes, dtype=torch.uint8).view(count, -1)
    combine_shards(pool.memory, parity, ids, on_device)
    for block, expected in enumerate(run.contents):
        assert pool.memory[block].numpy().tobytes() == expected

    def found() -> list[bool]:
        wanted = [[*loss.missing, -1][:2] for loss in lost]
        shards = torch.tensor(wanted, dtype=torch.int32)
        hashes = hash_shards(pool.memory, ids, shards, WHOLE.block_bytes // 10)
        rows = hashes.numpy().view(np.uint64).tolist()
        cut = [row[: len(loss.missing)] for row, loss in zip(rows, lost, strict=True)]
        return check_rebuilt(run.keys, lost, cut)

    assert all(found())
    place = lost[7].missing[0] * (WHOLE.block_bytes // 10)
    pool.memory[7, place] ^= 1
    assert [block for block, is_right in enumerate(found()) if not is_right] == [7]


@pytest.mark.gpu
def test_blocks_in_a_pool_on_a_gpu_are_what_was_stored_whatever_they_have_lost(
    rng: Random,
) -> None:
    run = LostRun(WHOLE, LOSSES[1:-1], rng, k=10, m=2)
    pool, rebuilder, kernels = gpu_rebuilder(run)
    lost = run.blocks_lost
    blocks = BlockList(rng.sample(range(pool.capacity_blocks), len(lost)))
    wait_to_end(*rebuilder.bring(cast("ArenaRun", run), run.keys, lost, blocks))
    for block_id, expected in zip(blocks, run.contents, strict=True):
        assert pool.memory[block_id].cpu().numpy().tobytes() == expected
    assert kernels.time_rebuild(8, time.perf_counter, rounds=1) > 0


@pytest.mark.gpu
def test_a_shard_that_lies_is_found_when_its_block_is_rebuilt_on_a_gpu(rng: Random) -> None:
    run = LostRun(WHOLE, [(3,), (0, 9), (4,)], rng, k=10, m=2)
    run.parity(1, 2)[5] ^= 1
    _, rebuilder, _ = gpu_rebuilder(run)
    transfers = rebuilder.bring(
        cast("ArenaRun", run), run.keys, run.blocks_lost, BlockList(range(3))
    )
    with pytest.raises(TransferFailed, match=r"block 1 .* without its shards \[0, 9\]"):
        wait_to_end(*transfers)


class CopyMover(MemcpyMover):
    """Into a pool on a GPU, by way of one of the host: what movers do is tested elsewhere."""

    def __init__(self, pool: BlockPool, layout: BlockLayout) -> None:
        host = BlockPool(block_bytes=pool.block_bytes, capacity_blocks=pool.capacity_blocks)
        super().__init__(host, layout)
        self._host, self._pool = host.memory, pool.memory

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        moved = super().to_pool(part, section, block_ids)
        self._pool.copy_(self._host)
        return moved

    def copy_in(
        self, part: memoryview, target: torch.Tensor, *, after: ComputeMark = None
    ) -> Transfer:
        target.view(-1).copy_(torch.frombuffer(part, dtype=torch.uint8))
        return ENDED


@pytest.mark.gpu
def test_parity_is_read_from_pages_that_are_held_while_a_rebuild_is_queued(rng: Random) -> None:
    """By the mover of an engine, out of an arena that is page-locked."""
    run = LostRun(WHOLE, [(3,), (0, 9), (), (4,)], rng, k=10, m=2)
    area = np.frombuffer(run.memory.view, np.uint8)
    locked = torch.empty(len(area), dtype=torch.uint8, pin_memory=True)
    locked.numpy()[:] = area
    run.memory = RunMemory(run.layout, locked.numpy().data, locked.data_ptr())
    pool, _, kernels = gpu_rebuilder(run)
    runtime = copy_of(open_runtime())
    pinned = PinnedMemory(runtime, pool.memory.device)
    range_ = pinned.adopt(locked)
    held: list[tuple[int, int]] = []
    copy = runtime.copy

    def watched(target: int, source: int, size_bytes: int, stream: int) -> None:
        if range_.users:
            held.append((source, size_bytes))
        copy(target, source, size_bytes, stream)

    runtime.copy = watched  # type: ignore[method-assign]
    mover = StagedMover(pool, WHOLE, pinned=pinned, runtime=runtime, kernels=TorchKernels())
    rebuilder = GpuRebuilder(pool, mover, kernels)
    lost = run.blocks_lost
    keys = [run.keys[loss.block] for loss in lost]
    wait_to_end(*rebuilder.bring(cast("ArenaRun", run), keys, lost, BlockList(range(3))))
    for block_id, loss in enumerate(lost):
        assert pool.memory[block_id].cpu().numpy().tobytes() == run.contents[loss.block]
    for first, end in ((0, 2), (3, 4)):
        part = run.parity(first, end)
        assert (address_of(part), part.nbytes) in held
    mover.close()
    pinned.close()


def gpu_rebuilder(run: LostRun) -> tuple[BlockPool, GpuRebuilder, ShardKernels]:
    pool = BlockPool(
        block_bytes=run.layout.layout.block_bytes,
        capacity_blocks=2 * run.layout.blocks,
        device=torch.device("cuda", 0),
    )
    kernels = ShardKernels(pool.device, pool.block_bytes, k=10, m=2)
    return pool, GpuRebuilder(pool, CopyMover(pool, run.layout.layout), kernels), kernels


@pytest.mark.parametrize("layout", [WHOLE, RAGGED], ids=["whole", "ragged"])
def test_a_shard_that_lies_is_found_when_its_block_is_rebuilt(
    layout: BlockLayout, rng: Random
) -> None:
    run = LostRun(layout, [(3,), (0, 9), (4,)], rng, k=10, m=2)
    run.parity(1, 2)[5] ^= 1
    assert rebuild_in_run(run.memory, run.keys, run.blocks_lost) == [True, False, True]
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=3)
    with pytest.raises(TransferFailed, match=r"block 1 .* without its shards \[0, 9\]"):
        bring(run, pool, range(3))


@pytest.mark.parametrize("lost", [[(3,)], [(3,), (0, 9), (4,)], [(), (3,), (), (0, 9), (4,), ()]])
def test_parity_of_blocks_that_have_lost_something_lies_together_in_the_end(
    lost: list[tuple[int, ...]], rng: Random
) -> None:
    run = LostRun(WHOLE, lost, rng, k=10, m=2)
    losses = run.blocks_lost
    mover = DelayedMover(BlockPool(block_bytes=WHOLE.block_bytes, capacity_blocks=1), WHOLE)
    target = torch.zeros((len(losses), 2, WHOLE.block_bytes // 10), dtype=torch.uint8)
    transfers = move_parity(mover, cast("ArenaRun", run), losses, target, None)
    assert not target.any()
    mover.go_on()
    wait_to_end(*transfers)
    for row, loss in zip(target, losses, strict=True):
        assert row.numpy().tobytes() == bytes(run.parity(loss.block, loss.block + 1))


def test_rebuilding_a_second_time_changes_nothing(rng: Random) -> None:
    run = LostRun(RAGGED, [(9,), (0, 1)], rng, k=10, m=2)
    assert all(rebuild_in_run(run.memory, run.keys, run.blocks_lost))
    before = bytes(run.memory.view)
    assert all(rebuild_in_run(run.memory, run.keys, run.blocks_lost))
    assert bytes(run.memory.view) == before


def test_the_measured_faster_one_rebuilds() -> None:
    assert choose_is_reader(RebuildTimes(agent_s=0.002, reader_s=0.0002))
    assert not choose_is_reader(RebuildTimes(agent_s=0.002, reader_s=0.002))
    clock = iter([0.0, 9.0, 10.0, 11.0, 20.0, 20.5, 30.0, 32.0])  # the first round is left out
    assert time_on_host(4, 2, 64, 2, clock=lambda: next(clock)) == 0.5


class FullAgent:
    """Of which the arena has no room."""

    def lease_run(self, *_: object, **__: object) -> None:
        return None


def test_engine_that_finds_a_full_arena_at_its_start_says_who_rebuilds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = BlockPool(block_bytes=WHOLE.block_bytes, capacity_blocks=1)
    mover = MemcpyMover(pool, WHOLE)
    on_gpu = cast("BlockPool", SimpleNamespace(memory=SimpleNamespace(device=torch.device("cuda"))))
    client = cast("BlockingAgentClient", FullAgent())
    namespace = StoredPrompt(1, layout=WHOLE).namespace
    assert find_rebuilder(client, namespace, on_gpu, mover, clock=time.monotonic) is None
    (record,) = caplog.records
    assert "rebuilt by the agent, whose arena has no room" in record.getMessage()


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ([], [(3, 9)]),
        ([3], [(4, 9)]),
        ([8], [(3, 8)]),
        ([4, 5, 7], [(3, 4), (6, 7), (8, 9)]),
        ([3, 4, 5, 6, 7, 8], []),
    ],
)
def test_ranges_between_places_that_are_left_out(
    left_out: list[int], expected: list[tuple[int, int]]
) -> None:
    assert cut_between(3, 9, left_out) == expected


class Follower:
    """A load of all blocks of a run, part by part, each of one block."""

    def __init__(
        self, run: LostRun, make_rebuilder: Callable[[MemcpyMover], Rebuilder] = HostRebuilder
    ) -> None:
        layout, count = run.layout.layout, run.blocks
        self.run = run
        self.pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=2 * count)
        self.load = ThreadedLoad(
            [],
            run.keys,
            sections=len(layout.sections),
            pool=self.pool,
            section_wait_s=0.0,
            bring=lambda load: load.take(),
            on_change=lambda: None,
            clock=time.monotonic,
        )
        plan = HitPlan(hit_tokens=count * BLOCK_TOKENS, replay_tokens=0, window_anchor=None)
        self.ids = list(reversed(self.pool.allocate(count)))
        self.load.begin(plan, self.ids, 0)
        mover = SmallSteps(self.pool, layout)
        self._copying = WorkThreads("swap-in", count=1, clock=time.monotonic)
        self.swap = RunSwap(
            self.load,
            cast("ArenaRun", run),
            mover=mover,
            copying=self._copying,
            clock=time.monotonic,
            rebuilder=make_rebuilder(mover),
        )

    def follow(self) -> None:
        try:
            self.swap.follow(time.monotonic() + DEADLINE_S)
        finally:
            assert self._copying.close(DEADLINE_S)

    def check(self, blocks: int) -> None:
        """So many blocks count as whole, and they are what was stored."""
        assert self.swap.whole_blocks == blocks
        for block_id, expected in zip(self.ids, self.run.contents[:blocks], strict=False):
            assert self.pool.buffer(block_id) == expected


class SmallSteps(MemcpyMover):
    step_bytes = 1


class LateRebuilder(HostRebuilder):
    """As a GPU: whether a block is right is known some time after it was asked for."""

    def bring(
        self,
        run: ArenaRun,
        keys: Sequence[bytes],
        losses: Sequence[BlockLoss],
        blocks: BlockList,
        *,
        after: ComputeMark = None,
    ) -> Sequence[Transfer]:
        try:
            super().bring(run, keys, losses, blocks)
        except RebuiltWrong as error:
            return [LateTransfer(error)]
        return [LateTransfer(None)]


class LateTransfer:
    """Ends when it is waited for."""

    has_ended = False

    def __init__(self, failure: RebuiltWrong | None) -> None:
        self._failure = failure

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure

    def order_compute(self) -> None:
        """Nobody computes."""


REBUILDERS = pytest.mark.parametrize("make_rebuilder", [HostRebuilder, LateRebuilder])


@REBUILDERS
def test_a_load_is_whole_whatever_its_blocks_have_lost(
    make_rebuilder: Callable[[MemcpyMover], Rebuilder], rng: Random
) -> None:
    losses = [(), (0,), (3, 7), (), (9,), (10, 11), (4, 11), ()]
    follower = Follower(LostRun(WHOLE, losses, rng, k=10, m=2), make_rebuilder)
    follower.follow()
    follower.check(len(losses))
    follower.load.wait_for_section(2)


@REBUILDERS
def test_a_load_ends_before_a_block_that_was_rebuilt_wrong(
    make_rebuilder: Callable[[MemcpyMover], Rebuilder], rng: Random
) -> None:
    run = LostRun(WHOLE, [(), (2,), (), (1, 8), (), (5,)], rng, k=10, m=2)
    run.parity(3, 4)[0] ^= 1
    follower = Follower(run, make_rebuilder)
    with pytest.raises(RebuiltWrong):
        follower.follow()
    assert follower.swap.whole_blocks <= 3
    follower.check(follower.swap.whole_blocks)


@pytest.fixture(scope="module")
def wide_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("wide")
    with LocalCluster.start(folder / "c", nodes=6, k=4, m=2, target_size_bytes=64 << 20) as started:
        yield started


@pytest.mark.slow
def test_loads_are_whole_while_nodes_are_killed(wide_cluster: LocalCluster) -> None:
    """A real agent: with every node, without two of them, and with all of them again."""
    with (
        AgentProcess(wide_cluster.cluster_path, ("--arena", "32MiB")) as agent,
        AgentClient.open(agent.socket_path, name="engine") as client,
    ):
        prompt = StoredPrompt(150, layout=WHOLE)
        prompt.save(client)
        # One node of six may still be writing when a block counts as stored.
        wait_until(lambda: count_shards(client) == 6 * len(prompt.keys))
        pool = prompt.pool(len(prompt.keys))
        mover = MemcpyMover(pool, WHOLE)
        rebuilder = CountingRebuilder(HostRebuilder(mover))
        faults = StoreFaults()
        source = AgentSource(
            client,
            namespace=prompt.namespace,
            pool=pool,
            window_layout=None,
            faults=faults,
            limits=PATIENT,
            clock=time.monotonic,
            mover=mover,
            rebuilder=rebuilder,
        )
        counts = []
        for lost in ((), (0, 3), (1,), ()):
            names = [wide_cluster.node_names[place] for place in lost]
            for name in names:
                wide_cluster.kill(name)
            before = rebuilder.blocks
            load_whole(source, prompt, pool)
            counts.append(rebuilder.blocks - before)
            for name in names:
                wide_cluster.restart_node(name)
            if names:
                # So long the agent may leave alone what is back: with the next one it would lack
                # three.
                time.sleep(BACKOFF_MAX_S)
        # With every node it is none, or what a busy machine brought late.
        assert counts[1] == len(prompt.keys), "every block has data on one of two nodes of six"
        assert counts[2] > 0
        assert source.close(DEADLINE_S)


def count_shards(client: BlockingAgentClient) -> int:
    """Of all blocks, on all nodes that answer."""
    targets = [one.statistics.get("targets", ()) for one in client.node_reports()]
    return sum(target["blocks"] for some in targets for target in some)


def load_whole(source: AgentSource, prompt: StoredPrompt, pool: BlockPool) -> None:
    """Have all blocks brought; they are the prompt's."""
    load = source.look_up(prompt.tokens, prompt.keys)
    wait_until(lambda: load.found is not None)
    assert load.found is not None
    pool.memory.fill_(0)
    ids = pool.allocate(len(prompt.keys))
    load.begin(load.found.plan, ids, 0)
    wait_until(lambda: load.outcome is not None)
    assert load.outcome is not None
    assert load.outcome.blocks == len(prompt.keys)
    for block_id, expected in zip(ids, prompt.blocks, strict=True):
        assert pool.buffer(block_id) == expected
    pool.release(ids)
