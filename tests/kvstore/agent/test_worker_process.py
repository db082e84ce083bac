"""When a worker ends: with its agent, with its channel, by a signal; as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.agent.jobs import (
    FetchPiece,
    Finish,
    NamespaceSpec,
    Ping,
    Pong,
    Started,
    StartFailed,
    WorkerKind,
    WorkerUsage,
    pack,
    report_decoder,
)
from kvstore.agent.worker_process import WorkerCommand, WorkerProcess
from kvstore.agent_messages import HEAD
from kvstore.arena.region import ArenaRegion
from tests.kvstore.agent.arena_runs import SectionedBlocks, is_running
from tests.kvstore.node.node_process import write_map
from tests.patience import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[3]

# An agent that has nothing but workers; it says their process numbers.
AGENT = """
import asyncio, json, sys, time
from pathlib import Path
from kvstore.agent.workers import WorkerPool
from kvstore.arena.region import ArenaRegion

async def serve():
    pool = WorkerPool(cluster_path=Path(sys.argv[1]), arena=ArenaRegion.create(1 << 20),
                      fetch_workers=2, has_store_worker=True,
                      loop=asyncio.get_running_loop(), clock=time.monotonic)
    await pool.start()
    said = pool.describe()
    workers = said["fetch"]["workers"] + said["store"]["workers"]
    sys.stdout.write(json.dumps([[one["pid"], one["state"]] for one in workers]) + "\\n")
    sys.stdout.flush()
    await asyncio.sleep(60)

asyncio.run(serve())
"""


class RawWorker:
    """A worker whose channel the test holds."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process = process
        self.channel = channel

    def receive(self) -> tuple[int, object]:
        length, number = HEAD.unpack(self._take(HEAD.size))
        return number, report_decoder.decode(self._take(length))

    def _take(self, length: int) -> bytes:
        content = self.channel.recv(length, socket.MSG_WAITALL)
        assert len(content) == length, content
        return content


@contextmanager
def raw_worker(cluster_path: Path) -> Iterator[RawWorker]:
    arena = ArenaRegion.create(1 << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(PATIENCE_S)
    command = [sys.executable, "-m", "kvstore.agent.worker", "--channel-fd", str(theirs.fileno())]
    command += ["--arena-fd", str(arena), "--cluster", str(cluster_path), "--kind", "fetch"]
    with subprocess.Popen(
        command, pass_fds=[theirs.fileno(), arena], cwd=ROOT, stderr=subprocess.DEVNULL
    ) as process:
        theirs.close()
        os.close(arena)
        try:
            with ours:
                yield RawWorker(process, ours)
        finally:
            process.kill()


def started(told: list[object], code: str) -> WorkerProcess:
    """A process of Python code in place of a worker, with the channel as `s`; `told` gets its
    messages, and how it ended."""

    class OtherCommand(WorkerCommand):
        def words(self, channel: int) -> list[str]:
            begin = "import os, socket, sys; from kvstore.agent.jobs import *"
            begin += f"; s = socket.socket(fileno={channel})"
            return [sys.executable, "-c", f"{begin}\n{code}"]

    arena = ArenaRegion.create(1 << 20)
    try:
        return WorkerProcess(
            OtherCommand(
                kind=WorkerKind.FETCH, cluster_path=ROOT, arena=arena, niceness=0, is_log_json=False
            ),
            loop=asyncio.get_running_loop(),
            on_message=lambda _, message: told.append(message),
            on_end=told.append,
        )
    finally:
        os.close(arena)


@pytest.mark.parametrize("stops_first", [False, True])
def test_workers_are_gone_when_their_agent_is_killed(tmp_path: Path, *, stops_first: bool) -> None:
    map_path = write_map(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(map_path)], stdout=subprocess.PIPE, cwd=ROOT
    ) as agent:
        assert agent.stdout is not None
        assert select.select([agent.stdout], [], [], PATIENCE_S)[0]
        workers = json.loads(agent.stdout.readline())
        pids = [pid for pid, _ in workers]
        assert [state for _, state in workers] == ["ready"] * 3
        assert all(map(is_running, pids))
        if stops_first:
            os.kill(pids[0], signal.SIGSTOP)
        agent.kill()
        wait_until(lambda: not any(map(is_running, pids)))


def test_worker_ends_when_its_channel_ends(tmp_path: Path) -> None:
    with raw_worker(write_map(tmp_path)) as worker:
        assert worker.receive() == (0, Started())
        worker.channel.shutdown(socket.SHUT_RDWR)
        assert worker.process.wait(PATIENCE_S) == 0


def test_worker_ends_when_it_is_told_to(tmp_path: Path) -> None:
    with raw_worker(write_map(tmp_path)) as worker:
        assert worker.receive() == (0, Started())
        worker.channel.sendall(pack(0, Finish()))
        assert worker.process.wait(PATIENCE_S) == 0


def test_worker_ends_when_it_is_sent_something_else(tmp_path: Path) -> None:
    with raw_worker(write_map(tmp_path)) as worker:
        assert worker.receive() == (0, Started())
        worker.channel.sendall(HEAD.pack(3, 1) + b"???")
        assert worker.process.wait(PATIENCE_S) == 0


def test_worker_ends_by_its_fault_when_a_job_comes_without_its_descriptor(tmp_path: Path) -> None:
    with raw_worker(write_map(tmp_path)) as worker:
        assert worker.receive() == (0, Started())
        blocks = SectionedBlocks(1, seed=1)
        piece = FetchPiece(
            namespace=NamespaceSpec.of(blocks.namespace),
            keys=blocks.keys[0],
            first_block=0,
            run_offset=0,
            run_blocks=1,
            place=0,
            piece=0,
            is_by_layer=False,
            deadline_s=60.0,
        )
        worker.channel.sendall(pack(1, piece))
        assert worker.process.wait(PATIENCE_S) == 1


async def test_end_of_a_worker_is_told_when_nobody_listened_to_its_last_words() -> None:
    told: list[object] = []
    worker = started(told, "s.sendall(pack(0, Started()) + pack(1, Pong(usage=WorkerUsage())))")
    # As when the agent is stopped, or busy.
    wait_until(lambda: not is_running(worker.pid))
    async with asyncio.timeout(PATIENCE_S):
        await worker.wait()
    assert told == [Started(), Pong(usage=WorkerUsage()), "exit code 0"]
    worker.kill()


async def test_end_by_a_signal_without_a_name_is_told() -> None:
    told: list[object] = []
    worker = started(told, "os.kill(os.getpid(), 40)")
    async with asyncio.timeout(PATIENCE_S):
        await worker.wait()
    assert told == ["killed by signal 40"]


def test_worker_ends_on_sigterm_and_not_on_sigint(tmp_path: Path) -> None:
    with raw_worker(write_map(tmp_path)) as worker:
        assert worker.receive() == (0, Started())
        worker.process.send_signal(signal.SIGINT)
        worker.channel.sendall(pack(9, Ping()))
        number, answer = worker.receive()
        assert number == 9
        assert isinstance(answer, Pong)
        worker.process.terminate()
        assert worker.process.wait(PATIENCE_S) == 0


def test_worker_says_why_it_cannot_start(tmp_path: Path) -> None:
    with raw_worker(tmp_path / "none.toml") as worker:
        number, answer = worker.receive()
        assert number == 0
        assert isinstance(answer, StartFailed)
        assert "no cluster map" in answer.problem
        assert worker.process.wait(PATIENCE_S) == 3
