"""`kvstored` as a process: how it starts, what it refuses, how it ends, and what is left then."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Op, WriteOutcome
from tests.kvstore.node.node_process import (
    CLUSTER,
    ROOT,
    NodeProcess,
    node_command,
    read_ready_line,
    run_to_end,
    socket_on_any_port,
    write_map,
)
from tests.kvstore.node.raw_client import (
    RawClient,
    Shard,
    keys_of,
    make_shards,
)
from tests.patience import wait_until

SHARD_BYTES = 11392


# Starting -------------------------------------------------------------------------------------


def test_node_says_on_one_line_that_it_serves(tmp_path: Path) -> None:
    map_path = write_map(tmp_path)
    with socket_on_any_port() as listener:
        command = node_command(map_path, "--listen-fd", str(listener.fileno()))
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            cwd=ROOT,
        )
        line = read_ready_line(process)
        host, port = listener.getsockname()
        assert line == {"node": "n01", "address": f"{host}:{port}", "pid": process.pid}
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
        assert (process.returncode, rest) == (0, b"")


def test_node_listens_on_its_address_when_no_socket_is_handed_over(tmp_path: Path) -> None:
    with socket_on_any_port() as probe:
        port = probe.getsockname()[1]
    map_path = write_map(tmp_path)
    map_path.write_text(map_path.read_text().replace("127.0.0.1:1", f"127.0.0.1:{port}"))
    command = node_command(map_path)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
    assert read_ready_line(process) is not None
    with socket.create_connection(("127.0.0.1", port), 5.0):
        # A second process of the same node is told who has its target, before it asks for the port.
        second = run_to_end(map_path)
    assert second.returncode == 5
    assert f"process {process.pid} serves it" in second.stderr
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_node_serves_although_nobody_reads_its_ready_line(tmp_path: Path) -> None:
    map_path, log_path = write_map(tmp_path), tmp_path / "log"
    outlet, inlet = os.pipe()
    os.close(outlet)
    with socket_on_any_port() as listener, open(log_path, "wb") as log:
        command = node_command(map_path, "--listen-fd", str(listener.fileno()))
        process = subprocess.Popen(
            command, stdout=inlet, stderr=log, pass_fds=[listener.fileno()], cwd=ROOT
        )
        os.close(inlet)
        with RawClient(listener.getsockname(), bytes.fromhex(CLUSTER), "t01", 0) as client:
            client.hello()
            assert client.match([]) == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    said = log_path.read_text()
    assert "nobody reads the ready line" in said
    assert "Traceback" not in said
    assert "BrokenPipeError" not in said


def check_refusal(found: subprocess.CompletedProcess[str], code: int, text: str) -> None:
    """The exit code, nothing on stdout, and an error line that is no traceback."""
    assert found.returncode == code, found.stderr
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    last = found.stderr.strip().splitlines()[-1]
    assert text in last, found.stderr


def test_node_refuses_wrong_arguments(tmp_path: Path) -> None:
    map_path = write_map(tmp_path)
    check_refusal(run_to_end(map_path, "--memory", "12"), 2, "expected 1048576")
    check_refusal(run_to_end(map_path, "--memory", "much"), 2, "given 'much', expected a size")
    check_refusal(run_to_end(map_path, "--sync", "often"), 2, "often")
    check_refusal(run_to_end(map_path, "--listen-fd", "77"), 2, "expected a listening")
    check_refusal(run_to_end(map_path, "--node", "n77"), 2, "given n77, expected one of")
    with socket.socket() as unbound:
        unbound.set_inheritable(True)
        found = subprocess.run(
            node_command(map_path, "--listen-fd", str(unbound.fileno())),
            capture_output=True,
            text=True,
            pass_fds=[unbound.fileno()],
            cwd=ROOT,
            check=False,
        )
        check_refusal(found, 2, "expected a listening")


def test_node_refuses_a_map_that_is_missing_or_has_mistakes(tmp_path: Path) -> None:
    check_refusal(run_to_end(tmp_path / "none.toml"), 3, "no cluster map at")
    map_path = write_map(tmp_path)
    map_path.write_text("format = 1\n")
    found = run_to_end(map_path)
    assert found.returncode == 3
    assert "mistake" in found.stderr
    assert "Traceback" not in found.stderr


def test_node_refuses_the_folder_of_another_cluster(tmp_path: Path) -> None:
    with NodeProcess(write_map(tmp_path)) as node:
        assert node.stop() == 0
    map_path = write_map(tmp_path, cluster="ff" * 16)
    check_refusal(run_to_end(map_path), 5, "its cluster is 0123456789abcdef0123456789abcdef")


def test_node_refuses_an_address_that_is_taken(tmp_path: Path) -> None:
    map_path = write_map(tmp_path)
    with socket_on_any_port() as listener:
        port = listener.getsockname()[1]
        map_path.write_text(map_path.read_text().replace("127.0.0.1:1", f"127.0.0.1:{port}"))
        check_refusal(run_to_end(map_path), 1, "cannot listen on")


def test_node_refuses_to_run_without_assertions(tmp_path: Path) -> None:
    command = node_command(write_map(tmp_path))
    command.insert(1, "-O")
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode != 0
    assert "assertions" in found.stderr


def test_node_serves_all_its_targets(tmp_path: Path, rng: random.Random) -> None:
    with NodeProcess(write_map(tmp_path, targets=3)) as node:
        shards = make_shards(rng, 3, SHARD_BYTES)
        with node.client(2) as third, node.client(0) as first:
            third.write(shards)
            assert third.match(keys_of(shards)) == [True] * 3
            assert first.match(keys_of(shards)) == [False] * 3
            # One connection can greet several targets.
            first.target, first.target_number = "t03", 2
            first.hello()
            assert first.match(keys_of(shards)) == [True] * 3
            assert [t["blocks"] for t in first.stat()["targets"]] == [0, 0, 3]


def test_log_lines_are_json_when_that_is_wanted(tmp_path: Path) -> None:
    with NodeProcess(write_map(tmp_path), ("--log-json",)) as node:
        assert node.stop() == 0
        lines = [json.loads(line) for line in node.log().splitlines()]
    assert all({"time", "level", "logger", "event"} <= line.keys() for line in lines)
    assert any("serving node=n01" in line["event"] for line in lines)


# Stopping -------------------------------------------------------------------------------------


def test_shards_are_there_after_a_clean_stop(tmp_path: Path, rng: random.Random) -> None:
    shards = make_shards(rng, 300, SHARD_BYTES)
    with NodeProcess(write_map(tmp_path)) as node:
        with node.client() as client:
            client.write(shards)
        assert node.stop() == 0
        node.start()
        with node.client() as client:
            found = client.read(keys_of(shards), SHARD_BYTES)
        assert [got.payload for got in found if got] == [shard.payload for shard in shards]


def test_node_ends_when_a_peer_does_not_read(tmp_path: Path, rng: random.Random) -> None:
    shards = make_shards(rng, 900, SHARD_BYTES)
    with NodeProcess(write_map(tmp_path)) as node, node.client() as client:
        client.write(shards)
        body = wire.pack_read(keys_of(shards), SHARD_BYTES)
        client.send(client.frame(Op.READ, body=body, count=900))
        time.sleep(0.1)
        assert node.stop() == 0


# Killing --------------------------------------------------------------------------------------


class Writer(threading.Thread):
    """Writes batches until the node is gone, and remembers what was sent and what acknowledged."""

    def __init__(self, node: NodeProcess, seed: int) -> None:
        super().__init__()
        self.client: RawClient = node.client()
        self.rng = random.Random(seed)
        self.sent: list[Shard] = []
        self.acknowledged: list[Shard] = []

    def run(self) -> None:
        try:
            while True:
                batch = make_shards(self.rng, self.rng.choice([1, 7, 64]), SHARD_BYTES)
                self.sent += batch
                for shard, outcome in zip(batch, self.client.write(batch), strict=True):
                    assert outcome in (WriteOutcome.STORED, WriteOutcome.FULL)
                    if outcome is WriteOutcome.STORED:
                        self.acknowledged.append(shard)
        except ConnectionError:
            self.client.close()


@pytest.mark.parametrize("sync", ["never", "batch"])
def test_acknowledged_shards_are_there_after_kill_9_and_no_others(
    tmp_path: Path, sync: str
) -> None:
    rng = random.Random(sync)
    arguments = ("--sync", sync, "--segment-size", "4MiB")
    sent: dict[bytes, Shard] = {}
    acknowledged: dict[bytes, Shard] = {}
    with NodeProcess(write_map(tmp_path, size_bytes=256 << 20), arguments) as node:
        for turn in range(3):
            writers = [Writer(node, seed=10 * turn + i) for i in range(3)]
            for writer in writers:
                writer.start()
            wait_until(lambda: sum(len(one.acknowledged) for one in writers) > 20)  # noqa: B023
            time.sleep(0.15 * rng.random())
            node.restart()
            for writer in writers:
                writer.join()
                sent |= {shard.key: shard for shard in writer.sent}
                acknowledged |= {shard.key: shard for shard in writer.acknowledged}
            with node.client() as client:
                found = read_all(client, list(sent))
                for key, payload in found.items():
                    assert payload == sent[key].payload
                assert acknowledged.keys() <= found.keys()
                (target,) = client.stat()["targets"]
                assert target["blocks"] == len(found)
    assert len(acknowledged) > 50


def read_all(client: RawClient, keys: list[bytes]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for at in range(0, len(keys), 512):
        part = keys[at : at + 512]
        for key, got in zip(part, client.read(part, SHARD_BYTES), strict=True):
            if got is not None:
                found[key] = got.payload
    return found


# Full disks -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB that holds nothing but the target."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = tmp_path / "small"
    path.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small file system: {mount.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_full_disk_stores_no_more_and_loses_nothing(
    tmp_path: Path, small_disk: Path, rng: random.Random
) -> None:
    # The map promises the target more room than its disk has.
    map_path = write_map(tmp_path, size_bytes=64 << 20, path=str(small_disk))
    with NodeProcess(map_path, ("--segment-size", "1MiB")) as node:
        stored: list[Shard] = []
        outcomes: list[WriteOutcome] = []
        with node.client() as client:
            for _ in range(20):
                shards = make_shards(rng, 64, SHARD_BYTES)
                outcomes = client.write(shards)
                stored += [
                    shard
                    for shard, outcome in zip(shards, outcomes, strict=True)
                    if outcome is WriteOutcome.STORED
                ]
            assert set(outcomes) == {WriteOutcome.FULL}
            assert 5 << 20 < len(stored) * SHARD_BYTES < 8 << 20
            assert read_all(client, keys_of(stored)) == {s.key: s.payload for s in stored}
            assert client.target_stat()["io_errors"] == 0
        assert sorted(path.suffix for path in small_disk.glob("segment*"))[-1] == ".seg"
        node.restart()
        with node.client() as client:
            assert read_all(client, keys_of(stored)) == {s.key: s.payload for s in stored}


def test_module_runs_like_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore.node", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "--cluster FILE" in found.stdout
    assert "exit codes:" in found.stdout
