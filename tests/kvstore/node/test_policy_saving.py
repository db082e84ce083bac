"""A policy takes effect at once, and is written as soon as the disk takes it."""

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.node import policy_store
from kvstore.node.policy_store import FILE_BYTES_MAX, POLICY_NAME, PolicyStore, parse_policy_file
from kvstore.node.server import ServerSettings
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from kvstore.wire import Op, Status
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import RawClient
from tests.kvstore.node.served_node import served_node
from tests.patience import wait_until

FAST = ServerSettings(look_interval_s=0.02, check_s=0.02)


@dataclass
class FullDisk(FaultyDisk):
    """Has no room for a byte that was not given to its file before, once it `is_full`."""

    is_full: bool = False

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        self._refuse_beyond(descriptor, size_bytes)
        super().allocate(descriptor, size_bytes)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> None:
        self._refuse_beyond(descriptor, offset + sum(map(len, views)))
        super().write(descriptor, views, offset)

    def _refuse_beyond(self, descriptor: int, end: int) -> None:
        if self.is_full and os.fstat(descriptor).st_blocks * 512 < end:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def next_policy(after: RetentionPolicy = DEFAULT_POLICY) -> RetentionPolicy:
    ttl_s = after.ttl_s["chat"] - 1
    return after.with_ttl("chat", ttl_s, who="a test", why="to see", at_s=1_800_000_000)


def tell(driven: DrivenNode, policy: RetentionPolicy) -> None:
    body = policy.to_json()
    answer = driven.ask(Op.POLICY, body, len(body))
    assert (answer.status, answer.body) == (Status.OK, body)


def send(client: RawClient, policy: RetentionPolicy) -> None:
    body = policy.to_json()
    client.send(client.frame(Op.POLICY, body=body, count=len(body)))


def test_policy_survives_a_restart_when_the_disk_filled_up_after_the_start(tmp_path: Path) -> None:
    disk = FullDisk()
    driven = DrivenNode(tmp_path / "t", disk=disk)
    disk.is_full = True
    policy = next_policy()
    tell(driven, policy)
    assert driven.stat()["policy_is_saved"] == 1
    driven.crash()
    driven.open()
    assert driven.node.policy.current == policy
    driven.close()


def test_room_is_kept_for_the_next_document_as_long_as_there_is_some(tmp_path: Path) -> None:
    disk = FullDisk()
    driven = DrivenNode(tmp_path / "t", disk=disk)
    policy = DEFAULT_POLICY
    for _ in range(3):
        policy = next_policy(policy)
        tell(driven, policy)
        reserved = driven.folder / "policy.tmp"
        assert reserved.stat().st_blocks * 512 >= FILE_BYTES_MAX
        written = (driven.folder / POLICY_NAME).read_bytes()
        assert parse_policy_file(written) == policy
        assert len(written) < 4096
    disk.is_full = True
    policy = next_policy(policy)
    tell(driven, policy)
    assert driven.stat()["policy_is_saved"] == 1
    tell(driven, next_policy(policy))
    assert driven.stat()["policy_is_saved"] == 0
    assert PolicyStore(driven.folder, disk).current == policy
    driven.close()


def test_node_starts_on_a_full_disk_without_room_for_a_policy(tmp_path: Path) -> None:
    disk = FullDisk()
    DrivenNode(tmp_path / "t", disk=disk).close()
    (tmp_path / "t" / "policy.tmp").unlink()
    disk.is_full = True
    driven = DrivenNode(tmp_path / "t", disk=disk)
    tell(driven, next_policy())
    assert driven.stat()["policy_is_saved"] == 0
    assert driven.node.policy.current == next_policy()
    driven.close()


def test_policy_is_written_later_when_the_disk_refused_it_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(policy_store, "RETRY_S", 0.05)
    disk = FaultyDisk()
    policy = next_policy()
    with served_node(tmp_path / "t", disk=disk, settings=FAST) as served:
        disk.refuse = {"write": errno.ENOSPC}
        with served.client() as client:
            send(client, policy)
            assert client.receive_answer().body == policy.to_json()
            assert client.stat()["policy_is_saved"] == 0
            tries = disk.calls.count("write")
            wait_until(lambda: disk.calls.count("write") >= tries + 3)
            assert client.stat()["policy_is_saved"] == 0
            assert not (tmp_path / "t" / POLICY_NAME).exists()
            disk.refuse = {}
            wait_until(lambda: client.stat()["policy_is_saved"] == 1)
    assert PolicyStore(tmp_path / "t", FaultyDisk()).current == policy
    assert caplog.text.count("policy not written") == 1


def test_policy_takes_effect_while_the_disk_hangs(tmp_path: Path) -> None:
    disk = FaultyDisk()
    first = next_policy()
    second = next_policy(first)
    with served_node(tmp_path / "t", disk=disk, settings=FAST) as served:
        disk.gate = threading.Event()
        with served.client() as teller, served.client() as other, served.client() as asker:
            try:
                send(teller, first)
                wait_until(lambda: asker.stat()["policy_version"] == 1)
                send(other, second)
                wait_until(lambda: asker.stat()["policy_version"] == 2)
                assert asker.stat()["policy_is_saved"] == 0
            finally:
                disk.gate.set()
            assert teller.receive_answer().status is Status.OK
            assert other.receive_answer().body == second.to_json()
            assert asker.stat()["policy_is_saved"] == 1
    assert PolicyStore(tmp_path / "t", FaultyDisk()).current == second
