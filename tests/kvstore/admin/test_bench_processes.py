"""The processes that `cachalot bench` measures against: what happens if they fail."""

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin import delaying_proxy as proxy_module
from kvstore.admin.bench_failure import BenchFailed
from kvstore.admin.delaying_proxy import delaying_proxy
from kvstore.admin.raw_socket import RawSocketBaseline, raw_socket_baseline

SHARD_BYTES = 64


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Give two connections, ours and the peer's end of each."""
    made = [socket.socketpair() for _ in range(2)]
    yield made
    for ours, peer in made:
        ours.close()
        peer.close()


def fetch_two_shards(pairs: list[tuple[socket.socket, socket.socket]], deadline_s: float) -> float:
    """One block of k = 2 shards, one from each connection."""
    baseline = RawSocketBaseline(
        [ours for ours, _ in pairs], k=2, shard_bytes=SHARD_BYTES, deadline_s=deadline_s
    )
    block = memoryview(bytearray(2 * SHARD_BYTES))
    return baseline.fetch([block], batch_blocks=1, in_flight=1)


def test_baseline_fetches_every_byte_from_real_processes() -> None:
    blocks = [memoryview(bytearray(3 * SHARD_BYTES)) for _ in range(10)]
    with raw_socket_baseline(width=4, k=3, shard_bytes=SHARD_BYTES, shard_count=10) as baseline:
        assert baseline.fetch(blocks, batch_blocks=4, in_flight=2) > 0
    arena = bytes(range(251)) * 2 + bytes(10 * SHARD_BYTES - 2 * 251)
    for number, block in enumerate(blocks):
        assert bytes(block) == arena[number * SHARD_BYTES : (number + 1) * SHARD_BYTES] * 3


@pytest.mark.timeout(20)
def test_baseline_fails_when_nothing_is_sent(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    with pytest.raises(BenchFailed, match=r"nothing was sent for 0\.05 s"):
        fetch_two_shards(pairs, deadline_s=0.05)


@pytest.mark.timeout(20)
def test_baseline_fails_when_a_process_ends_in_the_middle(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    pairs[0][1].sendall(bytes(SHARD_BYTES))
    pairs[1][1].sendall(bytes(SHARD_BYTES - 1))
    pairs[1][1].shutdown(socket.SHUT_WR)
    with pytest.raises(BenchFailed, match="a serving process has ended"):
        fetch_two_shards(pairs, deadline_s=5.0)


@pytest.mark.timeout(20)
def test_baseline_fails_when_a_process_ends_that_was_asked_for_nothing_more(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    pairs[0][1].sendall(bytes(SHARD_BYTES))
    pairs[0][1].shutdown(socket.SHUT_WR)
    with pytest.raises(BenchFailed, match="a serving process has ended"):
        fetch_two_shards(pairs, deadline_s=5.0)


def test_proxy_that_ends_at_its_start_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = shutil.which("false")
    assert program is not None
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(BenchFailed, match="proxy ended at its start"), delaying_proxy("h", 1, 1):
        pass


def test_proxy_that_never_says_its_port_is_an_error_after_its_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nread line\n")  # until its standard input is closed
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(proxy_module, "START_DEADLINE_S", 0.1)
    with (
        pytest.raises(BenchFailed, match=r"did not start within 0\.1 s"),
        delaying_proxy("h", 1, 1),
    ):
        pass
