"""`cachalot status` of clusters that are whole, half dead, busy, and not there."""

import json
import os
import signal
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import (
    BlockingStoreClient,
    BlockLayout,
    Namespace,
    Section,
    StoreClient,
)
from tests.kvstore.admin.command_line import (
    COMMAND,
    ROOT,
    cachalot,
    cachalot_here,
    cachalot_json,
    one_line,
)
from tests.patience import wait_until

BLOCKS = 4
BLOCK_BYTES = 4096


def test_status_shows_each_node_and_what_may_fail(running: Path) -> None:
    result = cachalot("status", "--cluster", running / "cluster.toml")
    lines = result.stdout.splitlines()
    assert lines[0].split() == [
        *("node", "state", "pid", "address", "blocks", "used", "capacity"),
        *("fill", "reads", "rejected", "uptime", "worker", "counted"),
    ]
    assert [line.split()[0] for line in lines[1:3]] == ["n01", "n02"]
    assert lines[-1] == (
        "2 of 2 nodes alive, code 1+1: 1 more may fail before blocks are unreadable"
    )
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def test_status_ends_with_6_when_nodes_are_down(folder: Path) -> None:
    with LocalCluster.start(folder, nodes=3, k=2, m=1) as cluster:
        cluster.kill("n01", signal.SIGKILL)
        cluster.kill("n02", signal.SIGSTOP)
        words = ("status", "--cluster", cluster.cluster_path, "--wait-s", "0.5")
        said = cachalot_json(*words, code=6)
        result = cachalot(*words, code=6)
        alive = cluster.node_pid("n03")
    assert (said["nodes_total"], said["nodes_alive"], said["spare_nodes"]) == (3, 1, -1)
    down = [node for node in said["nodes"] if not node["is_alive"]]
    assert len(down) == 2
    assert all(node["problem"] and node["pid"] is None for node in down)
    assert [node["pid"] for node in said["nodes"] if node["is_alive"]] == [alive]
    assert "blocks are unreadable until 1 more is back" in result.stdout
    assert result.stdout.count(" down ") == 2


def test_target_whose_folder_is_gone_counts_as_down_and_holds_nothing(folder: Path) -> None:
    with LocalCluster.start(folder, nodes=3, k=2, m=1, target_size_bytes=8 << 20) as cluster:
        words = ("status", "--cluster", cluster.cluster_path)
        cluster.target_folder("n02").rename(folder / "elsewhere")

        def is_lost() -> bool:
            return bool(json.loads(cachalot(*words, "--json", code=None).stdout)["targets_lost"])

        wait_until(is_lost)
        said = cachalot_json(*words, code=6)
        shown = cachalot(*words, code=6).stdout
        (folder / "elsewhere").rename(cluster.target_folder("n02"))
        wait_until(lambda: not is_lost())
        assert cachalot_json(*words)["spare_nodes"] == 1
    assert (said["nodes_alive"], said["spare_nodes"]) == (3, 0)
    assert said["targets_lost"] == ["n02-t0"]
    assert (said["nodes"][1]["blocks"], said["nodes"][1]["used_bytes"]) == (0, 0)
    assert shown.splitlines()[2].split()[:2] == ["n02", "lost"]
    assert "3 of 3 nodes alive, 1 target lost, code 2+1: none may fail any more" in shown


def test_status_of_a_cluster_that_is_down_is_still_an_answer(running: Path) -> None:
    cachalot("down", "--dir", running)
    said = cachalot_json("status", "--cluster", running / "cluster.toml", code=6)
    assert said["nodes_alive"] == 0
    assert all("Connection refused" in node["problem"] for node in said["nodes"])


def test_status_counts_blocks_reads_and_rejected_shards(folder: Path) -> None:
    layout = BlockLayout(sections=(Section("kv", BLOCK_BYTES),))
    namespace = Namespace(model="m", weights="w", tokenizer="t", layout=layout)
    keys = namespace.block_keys(np.arange(BLOCKS * 128, dtype=np.int32))
    data = [bytes([index]) * BLOCK_BYTES for index in range(BLOCKS)]
    into = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    with LocalCluster.start(folder, nodes=3, k=2, m=1, target_size_bytes=8 << 20) as cluster:
        with StoreClient.open(cluster.cluster_path) as store:
            assert store.save(namespace, keys, data).stored == BLOCKS
            # One node of three may still be writing when a block counts as stored.
            wait_until(lambda: count(store, "blocks") == 3 * BLOCKS)
            flip_stored_bytes(cluster, "n01")
            flip_stored_bytes(cluster, "n02")

            def is_damage_found() -> bool:
                store.fetch(namespace, keys, into)
                return count(store, "rejected_shards") > 0

            # A client reports damage behind the fetch that met it, and nobody waits for that.
            wait_until(is_damage_found)
        said = cachalot_json("status", "--cluster", cluster.cluster_path)
    nodes = {node["node"]: node for node in said["nodes"]}
    assert nodes["n03"]["blocks"] == BLOCKS
    assert nodes["n03"]["used_bytes"] >= BLOCKS * BLOCK_BYTES // 2
    assert nodes["n03"]["capacity_bytes"] == 8 << 20
    assert sum(node["reads"] for node in said["nodes"]) >= 2
    assert sum(node["rejected_shards"] for node in said["nodes"]) >= 1
    assert all(node["uptime_s"] > 0 for node in said["nodes"])


def count(store: BlockingStoreClient, name: str) -> int:
    """A figure of all targets together."""
    targets = [one for report in store.node_reports() for one in report.statistics["targets"]]
    return sum(target[name] for target in targets)


def flip_stored_bytes(cluster: LocalCluster, node: str) -> None:
    """Damage the first shard that a node stores: payloads lie behind the table of headers."""
    (segment,) = cluster.target_folder(node).glob("segment-*.seg")
    with open(segment, "r+b") as file:
        header_bytes, slot_count = struct.unpack_from("<II", file.read(32), 20)
        payload_offset = -(-(4096 + header_bytes * slot_count) // 4096) * 4096
        file.seek(payload_offset)
        damaged = bytes(byte ^ 0xFF for byte in file.read(16))
        file.seek(payload_offset)
        file.write(damaged)


def test_status_refuses_a_missing_map_in_one_line(tmp_path: Path) -> None:
    line = one_line(cachalot_here("status", "--cluster", tmp_path / "none.toml", code=3))
    assert line.startswith(f"cachalot: no cluster map at {tmp_path}/none.toml")


def test_status_shows_every_mistake_of_a_map(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('format = 1\nepoch = 0\ncluster = "x"\n[code]\nk = 0\nm = 2\n')
    result = cachalot_here("status", "--cluster", path, code=3)
    for name in ("epoch", "cluster", "code: k", "nodes", "targets", "groups"):
        assert f"  - {name}" in result.stderr, name


def test_status_ends_quietly_when_nobody_reads(running: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = subprocess.run(
        [*COMMAND, "status", "--cluster", str(running / "cluster.toml")],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=40.0,
        check=False,
    )
    os.close(writer)
    assert command.stderr == ""
    assert command.returncode == 141


@pytest.mark.parametrize("words", [("--wait-s", "0"), ("--wait-s", "soon"), ("--all",)])
def test_status_shows_usage_when_the_command_line_is_wrong(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    result = cachalot_here("status", "--cluster", tmp_path / "cluster.toml", *words, code=2)
    assert result.stderr.startswith("Usage: cachalot status")
