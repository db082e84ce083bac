"""A tiny disk under writes at full speed: it never overflows, and nobody waits or loses bytes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client.store_client import StoreClient
from tests.gc_worker.worker_bench import WorkerBench
from tests.kvstore.blocks import RandomBlocks

DISK_MIB = 64
SAVE_DEADLINE_S = 2.0
BLOCK_BYTES = 64 << 10
WRITTEN_BYTES_MIN = 2 * (DISK_MIB << 20)
"""So much is stored for certain, three times the room that there is for blocks."""
WRITING_S_MAX = 40.0
TORTURE_S = 180.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "cachalot-test", str(folder)]
    found = subprocess.run(mount, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"a file system cannot be mounted here: {found.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
async def test_full_disk_costs_writers_blocks_and_readers_nothing(disk: Path) -> None:
    await _fill_for(disk, writing_s=0.0)


@pytest.mark.torture
@pytest.mark.timeout(600)
async def test_full_disk_costs_the_same_after_minutes(disk: Path) -> None:
    await _fill_for(disk, writing_s=TORTURE_S)


async def _fill_for(disk: Path, writing_s: float) -> None:
    # Three targets that may each be far larger than the disk they share.
    with LocalCluster.start(
        disk / "c", nodes=3, k=2, m=1, target_size_bytes=1 << 30, segment_size_bytes=4 << 20
    ) as cluster:
        async with WorkerBench.open(cluster) as bench:
            async with bench.running():
                stored, read = await _write_and_read(cluster, writing_s)
            evicted = sum(c.counters.evicted["least_used"] for c in bench.contexts.values())
            # Far more was stored than there is room for, and the newest of it can be read.
            assert stored * BLOCK_BYTES >= WRITTEN_BYTES_MIN
            assert evicted > 0
            # What was stored just before is there, but for what made room in that instant.
            assert read >= 0.9 * stored
            limits = {c.usage[f"{node}-t0"].decided_by for node, c in bench.contexts.items()}
            assert limits <= {"file_system", "refused"}
            for node in cluster.node_names:
                stat = await bench.link.statistics(node)
                assert stat["targets"][0]["io_errors"] == 0
                assert stat["targets"][0]["rejected_shards"] == 0


async def _write_and_read(cluster: LocalCluster, writing_s: float) -> tuple[int, int]:
    """Blocks stored, and blocks read back just after, which must have the right bytes; goes on for
    `writing_s` and until enough is stored."""
    stored = read = 0
    least_end_s = time.monotonic() + writing_s
    async with StoreClient.connect(cluster.cluster_path) as store:
        seed, end_s = 0, least_end_s + WRITING_S_MAX
        while stored * BLOCK_BYTES < WRITTEN_BYTES_MIN or time.monotonic() < least_end_s:
            assert time.monotonic() < end_s, f"only {stored} blocks found room"
            seed += 1
            blocks = RandomBlocks(16, block_bytes=BLOCK_BYTES, seed=seed)
            saved = await store.save(
                blocks.namespace, blocks.keys, blocks.sources, deadline_s=SAVE_DEADLINE_S
            )
            stored += saved.stored
            target = blocks.empty_target()
            fetched = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
            size = fetched.blocks * BLOCK_BYTES
            assert target.area[:size].tobytes() == blocks.area[:size].tobytes()
            read += fetched.blocks
    return stored, read
