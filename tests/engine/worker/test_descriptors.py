"""A worker that has no descriptors left waits for some, and meanwhile does its work."""

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.worker.messages import Finished
from engine.worker.options import Role
from tests.engine.worker.worker_process import WorkerProcess, ask, submission

SPARE, IDLE_CLIENTS = 4, 60
SILENT_S = 3.0


@pytest.fixture
def worker(folder: Path, nano_path: Path) -> Iterator[WorkerProcess]:
    made = WorkerProcess("b", Role.BOTH, folder, nano_path, agent=None)
    made.start()
    made.wait_until_ready()
    yield made
    made.kill()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_clients_beyond_the_descriptors_cost_nothing_and_wait(worker: WorkerProcess) -> None:
    opened = len(os.listdir(f"/proc/{worker.pid}/fd"))
    soft, hard = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (opened + SPARE, hard))
    with ExitStack() as clients:
        for _ in range(IDLE_CLIENTS):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(worker.address.path))
        before_s = cpu_s(worker.pid)
        await asyncio.sleep(SILENT_S)
        assert cpu_s(worker.pid) - before_s < 0.1 * SILENT_S
        said = worker.log_path.read_text()
        assert 1 <= said.count("cannot accept: Too many open files") <= 2 * SILENT_S
        assert "Traceback" not in said
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (soft, hard))
    *_, last = await ask(worker.address, submission([5, 6, 7], 2))
    assert isinstance(last, Finished)
