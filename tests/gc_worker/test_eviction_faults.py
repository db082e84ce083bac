"""Eviction while something else goes wrong, or is changed, at the same moment."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from gc_worker import eviction as eviction_module
from gc_worker.folder_locks import locked_folders
from gc_worker.handle import Handle
from gc_worker.headers import HeaderReader
from gc_worker.journal import Journal
from gc_worker.sampling import HistorySampler
from gc_worker.victims import make_victims, pack_evict
from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.cluster.entities import Group
from kvstore.cluster.map import write_cluster_map
from kvstore.errors import DeadlineExceeded, NodeError, TargetLocked
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from kvstore.wire import EvictReason
from tests.gc_worker.repair_bench import empty
from tests.gc_worker.worker_bench import WorkerBench
from tests.patience import PATIENCE_S, until

DAY_S = 86_400


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("eviction-faults") / "cluster"
    with LocalCluster.start(folder, nodes=3, k=2, m=1, target_size_bytes=4 << 20) as it:
        yield it


@pytest.fixture
async def cluster(shared_cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    """Three nodes that hold nothing, and all run when the test ends."""
    yield shared_cluster
    await empty(shared_cluster)


async def test_eviction_goes_on_without_a_journal_when_the_disk_is_full(
    cluster: LocalCluster,
) -> None:
    async with WorkerBench.open(cluster) as bench:
        await bench.save(40, seed=1)
        (cluster.target_folder("n01") / "gc-journal.tmp").symlink_to("/dev/full")
        bench.clocks["n01"].ahead_s = 8 * DAY_S
        assert (await bench.evictions["n01"].run_now())["expired"] == 40
        assert await bench.shards_by_key() == {}


def test_worker_looks_after_a_folder_when_its_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    with (
        locked_folders([tmp_path], 1),
        pytest.raises(TargetLocked, match="looks after it"),
        locked_folders([tmp_path], 2),
    ):
        pass


async def test_eviction_stops_when_the_policy_changes_while_it_runs(cluster: LocalCluster) -> None:
    longer = MappingProxyType({"chat": 30 * DAY_S, "agent": 30 * DAY_S})
    changed = RetentionPolicy(version=1, ttl_s=longer)

    def undo(step: str) -> None:
        if step == "cleared":
            context.policy = changed

    async with WorkerBench.open(cluster, on_step=undo) as bench:
        context = bench.contexts["n01"]
        await bench.save(1400, seed=1)
        held = len(await bench.columns("n01"))
        assert held > 1200
        bench.clocks["n01"].ahead_s = 8 * DAY_S
        assert (await bench.evictions["n01"].run_now())["expired"] == 1024
        assert (await bench.evictions["n01"].run_now())["expired"] == 0
        assert len(await bench.columns("n01")) == held - 1024


async def test_clock_that_jumps_between_look_and_plan_evicts_nothing(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WorkerBench.open(cluster) as bench:
        blocks = await bench.save(50, seed=1)
        link, eviction = bench.contexts["n01"].link, bench.evictions["n01"]
        ask = link.statistics

        async def jump_and_ask(node: str) -> dict[str, object]:
            bench.clocks["n01"].ahead_s = 30 * DAY_S
            return await ask(node)

        monkeypatch.setattr(link, "statistics", jump_and_ask)
        await eviction.run_now()
        assert eviction.guard.jumps == 0
        await eviction.tick()
        assert eviction.guard.jumps == 1
        assert await bench.match(blocks) == 50


async def test_run_is_refused_until_the_policy_is_known(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction_module, "POLICY_WAIT_S", 0.05)
    async with WorkerBench.open(cluster, is_policy_known=False) as bench:
        blocks = await bench.save(50, seed=1)
        bench.clocks["n01"].ahead_s = 8 * DAY_S
        with pytest.raises(NodeError, match="policy"):
            await bench.evictions["n01"].run_now()
        assert await bench.match(blocks) == 50


async def test_dry_runs_take_turns(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerBench.open(cluster) as bench:
        await bench.save(50, seed=1)
        link, eviction = bench.contexts["n01"].link, bench.evictions["n01"]
        scan, running = link.scan, Counter[str]()

        async def count_and_scan(*given: int) -> object:
            running["now"] += 1
            running["most"] = max(running["most"], running["now"])
            try:
                return await scan(*given)  # type: ignore[arg-type]
            finally:
                running["now"] -= 1

        monkeypatch.setattr(link, "scan", count_and_scan)
        await asyncio.gather(*(eviction.plan_now(DEFAULT_POLICY) for _ in range(4)))
        assert running["most"] == 1


async def test_failure_of_a_run_that_nobody_waits_for_is_logged(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with WorkerBench.open(cluster) as bench:
        context, eviction = bench.contexts["n01"], bench.evictions["n01"]
        handle = Handle(context=context, eviction=eviction, sampler=HistorySampler(context), pid=1)
        cluster.kill("n01")
        assert not (await handle.run_gc(deadline_s=0.0))["is_done"]
        await until(lambda: any("asked for failed" in line for line in caplog.messages))
    cluster.restart_node("n01")


async def test_journal_in_flight_is_not_replaced_while_its_folder_rests(
    cluster: LocalCluster,
) -> None:
    async with WorkerBench.open(cluster) as bench:
        await bench.save(40, seed=1)
        eviction, folder = bench.evictions["n01"], cluster.target_folder("n01")
        # Left by a worker that was killed, in a folder that cannot be read just now.
        gone = await _leave_journal(bench, folder)
        aside = folder / "aside"
        os.rename(folder / "gc-journal", aside)
        (folder / "gc-journal").mkdir()
        await eviction.tick()
        (folder / "gc-journal").rmdir()
        os.rename(aside, folder / "gc-journal")
        bench.clocks["n01"].ahead_s = 8 * DAY_S
        eviction.guard.offset_s = None
        await eviction.run_now()
        assert not gone & set(await bench.shards_by_key())


async def _leave_journal(bench: WorkerBench, folder: Path) -> set[bytes]:
    """Ten blocks that are gone from n01 and from nowhere else, and the journal that says so."""
    columns = await bench.columns("n01")
    rows = np.arange(10)
    reader = HeaderReader(folder)
    found = reader.read(columns.location[rows].tolist(), columns.generation[rows])
    reader.close()
    reasons = np.full(10, EvictReason.EXPIRED, np.uint8)
    victims = make_victims(columns, rows, reasons, found)
    Journal(folder).write(victims)
    await bench.link.ask("n01-t0", wire.Op.EVICT, body=pack_evict(victims), count=10)
    return set(victims["key"].tolist())


async def test_target_that_hangs_keeps_no_other_one_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster.start(tmp_path / "c", nodes=1, k=1, m=0, target_size_bytes=4 << 20)
    cluster.stop()
    more = tuple(
        replace(target, name=f"{target.node}-t1", path=f"nodes/{target.node}/second")
        for target in cluster.map.targets
    )
    group = Group(name="g0001", targets=tuple(target.name for target in more))
    changed = replace(
        cluster.map,
        epoch=cluster.map.epoch + 1,
        targets=cluster.map.targets + more,
        groups=(*cluster.map.groups, group),
    )
    write_cluster_map(changed, cluster.cluster_path)
    with LocalCluster.start(cluster.cluster_path.parent) as grown:
        async with WorkerBench.open(grown) as bench:
            context, eviction = bench.contexts["n01"], bench.evictions["n01"]
            scan = context.link.scan

            async def hang_or_scan(target: str, *given: int) -> object:
                if target == "n01-t0":
                    raise DeadlineExceeded("n01", "no scan within 2.00 s")
                return await scan(target, *given)

            monkeypatch.setattr(context.link, "scan", hang_or_scan)
            with pytest.raises(DeadlineExceeded):
                await eviction.tick()
            assert context.counters.scans == 1
            assert set(context.usage) == {"n01-t0", "n01-t1"}


async def test_batch_in_flight_is_finished_when_a_lost_folder_is_back(
    cluster: LocalCluster,
) -> None:
    async with WorkerBench.open(cluster) as bench:
        await bench.save(40, seed=1)
        eviction, folder = bench.evictions["n01"], cluster.target_folder("n01")
        gone = await _leave_journal(bench, folder)
        aside = folder.with_name("aside")
        os.rename(folder, aside)
        await _wait_until_lost(bench, is_lost=True)
        await eviction.tick()
        os.rename(aside, folder)
        await _wait_until_lost(bench, is_lost=False)
        await eviction.tick()
        held = await bench.shards_by_key()
        assert len(held) == 30
        assert not gone & set(held)


async def _wait_until_lost(bench: WorkerBench, *, is_lost: bool) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while (await bench.link.statistics("n01"))["targets"][0]["is_lost"] is not is_lost:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)
