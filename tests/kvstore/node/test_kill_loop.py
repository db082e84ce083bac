"""kill -9 at random moments, again and again: nothing acknowledged is lost, nothing else is found.

Writers store, replace and forget shards; the node is killed while they do, while it starts, or
while it stops and writes its snapshot. What each key may hold afterwards follows from what was
acknowledged, in a plain dict. The number of rounds decides how long it takes: `make torture` runs
some hundred.
"""

from __future__ import annotations

import random
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.wire import WriteOutcome
from tests.kvstore.node.node_process import (
    CLUSTER,
    ROOT,
    START_S,
    read_ready_line,
    socket_on_any_port,
    write_map,
)
from tests.kvstore.node.raw_client import RawClient, Shard

SHARD_BYTES = 2000
KEYS_PER_WRITER_MAX = 700
WRITERS = 2
# A node that writes a snapshot of however few shards.
PROGRAM = """
import functools, sys
from kvstore.node import main
main.TargetSettings = functools.partial(main.TargetSettings, snapshot_shards_min=1)
sys.exit(main.main(sys.argv[1:]))
"""


@dataclass
class Writer:
    """One client and what it knows. `held` is what each key holds, `pending` what it may hold too.

    A value is the version that was written last, or None if the key is not there.
    """

    number: int
    rng: random.Random
    held: dict[bytes, int | None] = field(default_factory=dict)
    pending: dict[bytes, int | None] = field(default_factory=dict)
    acknowledged: int = 0
    failure: BaseException | None = None

    def run(self, client: RawClient) -> None:
        """Work until the connection breaks."""
        try:
            while True:
                self._step(client)
        except ConnectionError:
            client.close()
        except BaseException as error:
            self.failure = error
            raise

    def _step(self, client: RawClient) -> None:
        count = self.rng.choice([1, 5, 64])
        here = [key for key, version in self.held.items() if version is not None]
        choice = self.rng.random()
        if choice < 0.5 and len(here) < KEYS_PER_WRITER_MAX:
            keys = [self.rng.randbytes(32) for _ in range(count)]
            self._write(client, keys)
        elif choice < 0.75 and here:
            self._write(client, self.rng.sample(here, min(count, len(here))))
        elif here:
            self._forget(client, self.rng.sample(here, min(count, len(here))))

    def _write(self, client: RawClient, keys: list[bytes]) -> None:
        # A higher version always replaces a lower one.
        versions = [(self.held.get(key) or 0) + 1 for key in keys]
        self.pending = dict(zip(keys, versions, strict=True))
        for key in keys:
            self.held.setdefault(key, None)
        shards = [
            Shard(key, payload_of(key, version), version)
            for key, version in zip(keys, versions, strict=True)
        ]
        for key, outcome in zip(keys, client.write(shards), strict=True):
            version = self.pending.pop(key)
            assert outcome is WriteOutcome.STORED
            self.held[key] = version
            self.acknowledged += 1

    def _forget(self, client: RawClient, keys: list[bytes]) -> None:
        self.pending = dict.fromkeys(keys)
        assert client.forget(keys) == [True] * len(keys)
        for key in keys:
            self.held[key] = self.pending.pop(key)
            self.acknowledged += 1

    def check(self, client: RawClient) -> int:
        """Assert that the node holds what it must; returns how many shards of ours it has."""
        keys = list(self.held)
        for at in range(0, len(keys), 512):
            part = keys[at : at + 512]
            for key, got in zip(part, client.read(part, SHARD_BYTES), strict=True):
                found = got.block_xxh3 if got else None
                allowed = {self.held[key], self.pending.get(key, self.held[key])}
                assert found in allowed, f"{key.hex()} holds {found}, expected one of {allowed}"
                if got:
                    assert got.payload == payload_of(key, got.block_xxh3)
                self.held[key] = found
        self.pending = {}
        # A key that was forgotten must stay so; a few of them are asked for again next time.
        gone = [key for key, version in self.held.items() if version is None]
        for key in gone[:-100]:
            del self.held[key]
        return sum(version is not None for version in self.held.values())


def payload_of(key: bytes, version: int) -> bytes:
    return random.Random(key + version.to_bytes(8)).randbytes(SHARD_BYTES)


class KilledNode:
    """A `kvstored` that is killed rather than asked."""

    def __init__(self, map_path: Path) -> None:
        self.map_path = map_path
        self.log_path = map_path.parent / "kvstored.log"
        self.process: subprocess.Popen[bytes]
        self.port = 0

    def spawn(self) -> None:
        with socket_on_any_port() as listener, open(self.log_path, "ab") as log:
            self.port = listener.getsockname()[1]
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", PROGRAM, "--cluster", str(self.map_path)),
                    *("--node", "n01", "--sync", "batch", "--segment-size", "1MiB"),
                    *("--listen-fd", str(listener.fileno())),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[listener.fileno()],
                cwd=ROOT,
            )

    def wait_ready(self) -> None:
        assert read_ready_line(self.process) is not None, self.log_path.read_text()[-2000:]

    def client(self) -> RawClient:
        client = RawClient(("127.0.0.1", self.port), bytes.fromhex(CLUSTER), "t01")
        client.hello()
        return client

    def wait(self, seconds: float) -> None:
        """Until it says that it is ready, or ends, but not longer."""
        assert self.process.stdout is not None
        select.select([self.process.stdout], [], [], seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(START_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def kill_at_a_random_moment(node: KilledNode, rng: random.Random) -> str:
    """End the node in one of three ways; returns which."""
    way = rng.choice(["at work", "at work", "at its stop", "at its start"])
    time.sleep(rng.uniform(0.0, 0.25))
    if way == "at its stop":
        node.process.send_signal(signal.SIGTERM)
        node.wait(rng.uniform(0.0, 0.3))
    node.kill()
    if way == "at its start":
        node.spawn()
        node.wait(rng.uniform(0.0, 0.6))
        node.kill()
    return way


def run_kill_loop(tmp_path: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    writers = [Writer(i, random.Random(seed * 10 + i)) for i in range(WRITERS)]
    node = KilledNode(write_map(tmp_path, size_bytes=64 << 20))
    node.spawn()
    try:
        node.wait_ready()
        for turn in range(rounds):
            clients = [node.client() for _ in writers]
            threads = [
                threading.Thread(target=writer.run, args=(client,))
                for writer, client in zip(writers, clients, strict=True)
            ]
            for thread in threads:
                thread.start()
            way = kill_at_a_random_moment(node, rng)
            for thread, writer in zip(threads, writers, strict=True):
                thread.join(START_S)
                assert writer.failure is None, f"seed {seed} round {turn}"
            node.spawn()
            node.wait_ready()
            with node.client() as client:
                held = sum(writer.check(client) for writer in writers)
                blocks = client.target_stat()["blocks"]
                assert blocks == held, f"seed {seed} round {turn}: {blocks} shards, {way}"
    finally:
        node.kill()
    assert sum(writer.acknowledged for writer in writers) > 20 * rounds
    log = node.log_path.read_text()
    assert "damaged shard" not in log
    if rounds >= 50:
        assert "from=snapshot" in log
        assert "from=headers" in log


@pytest.mark.slow
def test_kill_9_loses_nothing_acknowledged_and_leaves_nothing_else(tmp_path: Path) -> None:
    run_kill_loop(tmp_path, rounds=8, seed=1)


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [2, 3])
def test_kill_9_loop(tmp_path: Path, seed: int) -> None:
    run_kill_loop(tmp_path, rounds=200, seed=seed)
