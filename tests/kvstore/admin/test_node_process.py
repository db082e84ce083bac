"""A process is ours only if its own command line says so, whatever a file says about its pid."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.admin.node_process import (
    NodeProcess,
    StopDeadlines,
    is_alive,
    is_command_of_node,
    terminate,
)
from kvstore.errors import NodeError
from tests.patience import PATIENCE_S

MAP = Path("/data/a/cluster.toml")
QUICK = StopDeadlines(term_s=0.5, kill_s=10.0)
NEVER_ENDS = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)\n"
)


@pytest.mark.parametrize(
    ("command", "is_ours"),
    [
        ("python -m kvstore.node.main --cluster /data/a/cluster.toml --node n01", True),
        ("python -X dev -m kvstore.node.main --cluster /data/a/cluster.toml --node n01", True),
        ("python /venv/bin/kvstored --node n01 --cluster /data/a/cluster.toml", True),
        ("/venv/bin/kvstored --node=n01 --cluster=/data/a/cluster.toml", True),
        ("python -m kvstore.node.main --cluster /data/a/../a/cluster.toml --node n01", True),
        ("python -m kvstore.node.main --cluster /data/a/cluster.toml --node n02", False),
        ("python -m kvstore.node.main --cluster /data/a/cluster.toml --node n011", False),
        ("python -m kvstore.node.main --cluster /data/b/cluster.toml --node n01", False),
        ("python -m kvstore.node.main --cluster cluster.toml --node n01", False),
        ("python -m kvstore.node.main --cluster /data/a/cluster.toml", False),
        ("python -m kvstore.node.main --node n01 --cluster", False),
        ("python -m kvstore.node --cluster /data/a/cluster.toml --node n01", True),
        ("python -m kvstore.nodes --cluster /data/a/cluster.toml --node n01", False),
        ("vim kvstore.node.main --cluster /data/a/cluster.toml --node n01", False),
        ("tail -f x kvstored --cluster /data/a/cluster.toml --node n01", False),
        ("sleep 60", False),
        ("", False),
    ],
)
def test_command_line_decides_whose_a_process_is(command: str, is_ours: bool) -> None:
    assert is_command_of_node(command.split(), place_path=MAP, node="n01") == is_ours


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that has nothing to do with us."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def start_node_like(cluster_path: Path, code: str) -> subprocess.Popen[bytes]:
    """Start a process whose command line is that of node n01, and that runs `code`."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", code + "time.sleep(60)"),
            *("-m", "kvstore.node.main", "--cluster", str(cluster_path), "--node", "n01"),
        ],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def deaf_node(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that looks like node n01 and does not heed SIGTERM."""
    with start_node_like(tmp_path / "cluster.toml", NEVER_ENDS) as process:
        yield process
        process.kill()


def test_foreign_process_is_not_found(sleeper: subprocess.Popen[bytes]) -> None:
    assert NodeProcess.find(sleeper.pid, place_path=MAP, node="n01") is None
    assert is_alive(sleeper.pid)
    assert sleeper.poll() is None


def test_no_process_is_found_when_the_pid_is_free(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    assert NodeProcess.find(sleeper.pid, place_path=MAP, node="n01") is None
    assert not is_alive(sleeper.pid)
    for pid in (2**22 + 1, 2**31, 2**40, 2**70):
        assert NodeProcess.find(pid, place_path=MAP, node="n01") is None
        assert not is_alive(pid)


def test_ended_process_is_not_found_before_it_is_reaped(
    tmp_path: Path, deaf_node: subprocess.Popen[bytes]
) -> None:
    found = NodeProcess.find(deaf_node.pid, place_path=tmp_path / "cluster.toml", node="n01")
    assert found is not None
    with found:
        deaf_node.kill()
        assert found.wait_for_end(deadline_s=PATIENCE_S)
        again = NodeProcess.find(deaf_node.pid, place_path=tmp_path / "cluster.toml", node="n01")
        assert again is None
        assert not is_alive(deaf_node.pid)
        found.send(signal.SIGTERM)  # to nobody, which is no error


@pytest.mark.parametrize("attempt", range(3))
def test_process_that_is_giving_back_its_memory_has_ended(attempt: int) -> None:
    """Its command line is gone by then, and its state is still that of one that runs."""
    code = "b = b'x' * (256 << 20); print(flush=True); input()"
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.readline()
        process.kill()
        while _has_memory(process.pid):
            pass
        assert not is_alive(process.pid)


def _has_memory(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/cmdline").read_bytes())


def test_deaf_process_is_killed_after_its_deadline(
    tmp_path: Path, deaf_node: subprocess.Popen[bytes]
) -> None:
    found = NodeProcess.find(deaf_node.pid, place_path=tmp_path / "cluster.toml", node="n01")
    assert found is not None
    with found:
        assert terminate({"n01": found}, QUICK) == {"n01": True}
    assert deaf_node.wait() == -signal.SIGKILL


def test_stopped_process_is_terminated_without_a_kill(tmp_path: Path) -> None:
    code = "import time; print(flush=True)\n"
    with start_node_like(tmp_path / "cluster.toml", code) as process:
        found = NodeProcess.find(process.pid, place_path=tmp_path / "cluster.toml", node="n01")
        assert found is not None
        with found:
            found.send(signal.SIGSTOP)
            assert found.wait_for_stop(deadline_s=PATIENCE_S)
            assert not found.wait_for_end(deadline_s=0.0)
            assert terminate({"n01": found}, StopDeadlines()) == {"n01": False}
        assert process.wait() == -signal.SIGTERM


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process may open so many more files, and no more."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [0, 1])
def test_live_process_does_not_count_as_ended_when_no_more_files_may_be_opened(
    tmp_path: Path, deaf_node: subprocess.Popen[bytes], count: int
) -> None:
    cluster_path = tmp_path / "cluster.toml"
    before = os.listdir("/proc/self/fd")
    with (
        descriptors_left(count),
        pytest.raises(NodeError, match=rf"node n01: .* {deaf_node.pid} is alive: Too many open"),
    ):
        NodeProcess.find(deaf_node.pid, place_path=cluster_path, node="n01")
    assert os.listdir("/proc/self/fd") == before
    found = NodeProcess.find(deaf_node.pid, place_path=cluster_path, node="n01")
    assert found is not None
    found.close()


def test_no_process_is_found_when_the_number_is_now_that_of_a_thread() -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        assert NodeProcess.find(thread.native_id, place_path=MAP, node="n01") is None
    finally:
        is_over.set()
        thread.join()
