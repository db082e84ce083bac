"""Records that lead to no process of ours: nothing is signalled, and nothing is kept silent."""

import errno
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin.local_folder import LocalFolder, NodeRecord
from kvstore.admin.node_process import StopDeadlines
from kvstore.admin.node_stop import StopOutcome, stop_nodes
from kvstore.errors import NodeError

FREE_ADDRESS = "127.0.0.1:1"


@pytest.fixture
def place(tmp_path: Path) -> LocalFolder:
    """Give a folder in which node n01 can have a record."""
    place = LocalFolder(tmp_path)
    place.node_path("n01").mkdir(parents=True)
    return place


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that has nothing to do with us."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def stop(place: LocalFolder, pid: int, address: str = FREE_ADDRESS) -> StopOutcome:
    place.write_record(NodeRecord(node="n01", address=address, pid=pid))
    (stopped,) = stop_nodes(place, ["n01"], StopDeadlines())
    assert stopped.pid == pid
    return stopped.outcome


def test_record_of_an_impossible_pid_counts_as_no_process_with_a_remark(
    place: LocalFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stop(place, 2**40) is StopOutcome.NOT_RUNNING
    assert not place.record_path("n01").exists()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert str(2**40) in said[0]


def test_record_of_a_foreign_process_is_kept_aside_with_a_remark(
    place: LocalFolder, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert stop(place, sleeper.pid) is StopOutcome.NOT_RUNNING
    assert sleeper.poll() is None
    assert place.recorded_nodes() == []
    aside = place.node_path("n01") / "kvstored.json.foreign"
    assert str(sleeper.pid) in aside.read_text()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f"process {sleeper.pid} is alive but is not this node" in said[0]
    assert str(aside) in said[0]


def test_record_of_an_ended_process_goes_without_a_remark(
    place: LocalFolder, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper.kill()
    sleeper.wait()
    assert stop(place, sleeper.pid) is StopOutcome.NOT_RUNNING
    assert os.listdir(place.node_path("n01")) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("address", ["", "x", "127.0.0.1:", "127.0.0.1:99999999", ":::"])
def test_record_of_no_address_is_no_error(
    place: LocalFolder, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    stop(place, 2**22 + 1 - 2, address)
    assert capsys.readouterr().err == ""


def test_stop_says_that_something_still_listens_on_the_address(
    place: LocalFolder, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        stop(place, sleeper.pid, address)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert f"something is still listening on {address}" in said[1]


def test_process_of_another_user_is_named_with_its_user(
    place: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    command = [sys.executable, "-c", "import time; time.sleep(60)", "-m", "kvstore.node"]
    command += ["--cluster", str(place.cluster_path), "--node", "n01"]
    with subprocess.Popen(command) as process:
        place.write_record(NodeRecord(node="n01", address=FREE_ADDRESS, pid=process.pid))
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
        with pytest.raises(NodeError) as raised:
            stop_nodes(place, ["n01"], StopDeadlines())
        process.kill()
    owner = pwd.getpwuid(os.geteuid()).pw_name
    assert str(raised.value) == (
        f"node n01: process {process.pid} is of user {owner}; run this as that user, or as root"
    )
    assert place.read_record("n01") is not None
