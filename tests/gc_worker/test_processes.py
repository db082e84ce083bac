"""The worker as a process: started twice, killed at every step, stopped, left without its node."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gc_worker import policy_sync, watch
from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from tests.gc_worker.worker_bench import WorkerBench
from tests.patience import PATIENCE_S, until

STEPS = ("read", "located", "journaled", "evicted", "withdrawn", "cleared")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("workers") / "cluster"
    with LocalCluster.start(folder, nodes=3, k=2, m=1, target_size_bytes=1 << 20) as it:
        yield it


@contextmanager
def worker(
    cluster: LocalCluster,
    node: str,
    *options: str,
    module: Sequence[str] = ("gc_worker",),
    log: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A worker process; killed at the end if it still runs."""
    command = [sys.executable, "-m", *module, "--cluster", str(cluster.cluster_path)]
    with open(log or "/dev/null", "w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*command, "--node", node, *options], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


async def set_policy(bench: WorkerBench, policy: RetentionPolicy, node: str) -> None:
    document = policy.to_json()
    target = bench.link.any_target(node)
    await bench.link.ask(target, wire.Op.POLICY, body=document, count=len(document))


async def policy_version(bench: WorkerBench, node: str) -> int:
    answer = await bench.link.ask(bench.link.any_target(node), wire.Op.POLICY)
    return RetentionPolicy.parse(answer).version


@pytest.mark.parametrize("step", STEPS)
async def test_eviction_that_is_killed_is_finished_by_the_next_worker(
    cluster: LocalCluster, step: str
) -> None:
    async with WorkerBench.open(cluster) as bench:
        seed = STEPS.index(step) * 10 + 1
        while await bench.fill("n02") <= 0.9:
            await bench.save(60, seed=seed)
            seed += 1
        module = ("tests.gc_worker.killed_worker", step)
        with worker(cluster, "n02", module=module) as killed:
            await asyncio.to_thread(killed.wait, PATIENCE_S)
            assert killed.returncode == -signal.SIGKILL
        journal = cluster.target_folder("n02") / "gc-journal"
        assert journal.exists() == (step in ("journaled", "evicted", "withdrawn"))
        if step == "evicted":
            # This is the state that the journal is there for.
            assert set((await bench.shards_by_key()).values()) == {2, 3}
        with worker(cluster, "n02"):
            end_s = time.monotonic() + PATIENCE_S
            while await bench.fill("n02") > 0.85 or journal.exists():
                assert time.monotonic() < end_s
                await asyncio.sleep(0.05)
            # Every block is where it was or gone from everywhere, once peers have gone on with it.
            while set((await bench.shards_by_key()).values()) != {3}:
                assert time.monotonic() < end_s
                await asyncio.sleep(0.05)
        # No more went than had to.
        assert await bench.fill("n02") > 0.75


def test_second_worker_of_a_node_refuses_and_names_the_first(cluster: LocalCluster) -> None:
    with worker(cluster, "n01") as first:
        assert first.stdout is not None
        ready = json.loads(first.stdout.readline())
        assert ready == {"node": "n01", "pid": first.pid, "control": None}
        command = [sys.executable, "-m", "gc_worker", "--cluster", str(cluster.cluster_path)]
        second = subprocess.run(
            [*command, "--node", "n01"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert second.returncode == 5
        assert f"gc_worker process {first.pid} looks after it" in second.stderr
        assert second.stdout == ""
        # The first one is killed without a chance to clean up, and its lock with it.
        first.kill()
        first.wait(PATIENCE_S)
        with worker(cluster, "n01") as third:
            assert third.stdout is not None
            assert json.loads(third.stdout.readline())["pid"] == third.pid


def test_worker_ends_cleanly_when_it_is_told_to(cluster: LocalCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with worker(cluster, "n03", "--log-json", log=log) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-1]["event"] == "stopped node=n03"
    assert all(line["level"] == "INFO" for line in lines), lines


async def test_worker_waits_for_its_node_and_follows_the_policy_of_its_peers(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    cluster.kill("n03")
    async with WorkerBench.open(cluster) as bench:
        with worker(cluster, "n03", log=log) as process:
            await until(lambda: "waiting for it" in log.read_text())
            policy = DEFAULT_POLICY.with_watermarks(
                high=0.6, low=0.5, who="test", why="room", at_s=bench.contexts["n03"].now_s()
            )
            await set_policy(bench, policy, "n01")
            cluster.restart_node("n03")
            end_s = time.monotonic() + PATIENCE_S
            while await policy_version(bench, "n03") != policy.version:
                assert time.monotonic() < end_s
                await asyncio.sleep(0.05)
            while await bench.fill("n03") > 0.6:
                assert time.monotonic() < end_s
                await asyncio.sleep(0.05)
            assert process.poll() is None
        assert "the own node answers again" in log.read_text()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--node", "n99"], 2, "expected one of the map's: n01, n02, n03"),
        (["--node", "n01", "--control", "127.0.0.1:0"], 2, "--token-file: give both or none"),
        (["--node", "n01", "--cluster", "/none/map"], 3, "no cluster map at /none/map"),
    ],
)
def test_worker_says_what_is_wrong_with_its_arguments(
    cluster: LocalCluster, options: list[str], code: int, said: str
) -> None:
    command = [sys.executable, "-m", "gc_worker", "--cluster", str(cluster.cluster_path)]
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == code
    assert said in result.stderr


def test_policy_and_disk_are_looked_at_often_enough_for_a_watermark_to_act_in_five_seconds() -> (
    None
):
    """A worker asks its node for the policy, which the command has told it, and for its fill."""
    assert policy_sync.INTERVAL_S + watch.INTERVAL_S < 5.0


async def test_watermark_set_by_the_command_takes_effect(tmp_path: Path) -> None:
    """From the command to shards that are gone; nothing is restarted."""
    folder = tmp_path / "cluster"
    with LocalCluster.start(
        folder, nodes=3, k=2, m=1, target_size_bytes=1 << 20, gc=True
    ) as cluster:
        async with WorkerBench.open(cluster) as bench:
            await bench.save(200, seed=1)
            assert await bench.fill("n03") > 0.3
            command = [sys.executable, "-m", "kvstore.admin.cli", "watermark", "set"]
            marks = ["--high", "0.2", "--low", "0.1", "--cluster", str(cluster.cluster_path)]
            await _wait_for_command([*command, *marks])
            end_s = time.monotonic() + PATIENCE_S
            while max([await bench.fill(node) for node in cluster.node_names]) > 0.2:
                assert time.monotonic() < end_s
                await asyncio.sleep(0.05)


async def _wait_for_command(words: Sequence[str]) -> None:
    """Run a command until it is done, as workers may still be starting."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        await asyncio.wait_for(process.communicate(), PATIENCE_S)
        if process.returncode == 0:
            return
        assert time.monotonic() < end_s, "the command failed"


def test_control_api_is_served_where_the_map_says(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with LocalCluster.start(folder, nodes=1, k=1, m=0, target_size_bytes=1 << 20, gc=True) as one:
        control = one.map.node_by_name["n01"].control
        assert control is not None
        one.workers.stop(["n01"])
        token = one.cluster_path.parent / "control-token"
        options = ("--control", "map", "--token-file", str(token))
        with worker(one, "n01", *options) as started:
            assert started.stdout is not None
            assert json.loads(started.stdout.readline())["control"] == control
        # A map without an address is named, instead of a worker that nobody reaches.
        map_text = one.cluster_path.read_text()
        one.cluster_path.write_text(map_text.replace(f'control = "{control}"', ""))
        with worker(one, "n01", *options, log=tmp_path / "log") as refused:
            assert refused.wait(PATIENCE_S) == 2
        assert "a `control` address of node 'n01'" in (tmp_path / "log").read_text()
