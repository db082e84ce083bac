"""One process of a worker, from its start to its end, as the agent sees it.

Who decides that it must end, and what happens then, is not here: see worker_slot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .job_channel import JobChannel
from .jobs import Order, ReportMessage, WorkerKind, report_decoder

log = logging.getLogger(__name__)

CODE_ROOT = Path(__file__).resolve().parents[2]
"""Workers run the very code that starts them, also where it is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """How a worker is started."""

    kind: WorkerKind
    cluster_path: Path
    """Absolute."""
    arena: int
    """Descriptor of the arena; stays the caller's."""
    niceness: int
    is_log_json: bool

    def words(self, channel: int) -> list[str]:
        words = [sys.executable, "-m", "kvstore.agent.worker"]
        words += ["--channel-fd", str(channel), "--arena-fd", str(self.arena)]
        words += ["--cluster", str(self.cluster_path), "--kind", self.kind.value]
        if self.niceness:
            words += ["--niceness", str(self.niceness)]
        if self.is_log_json:
            words.append("--log-json")
        return words


class WorkerProcess:
    """A worker that was started. To be made in the thread that lives as long as the agent: the
    kernel ends the worker with that thread."""

    def __init__(
        self,
        command: WorkerCommand,
        *,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[int, ReportMessage], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`on_end` is called once, when the process has ended and everything that it sent has been
        told to `on_message`; with how it ended. Raises OSError if the system gives no process."""
        self._loop = loop
        self._on_end = on_end
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._process = _spawn(command, theirs)
            self._descriptor = _open(self._process)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        ours.setblocking(False)
        self._channel = JobChannel(
            ours, report_decoder, loop=loop, on_message=on_message, on_end=self._cut_off
        )
        self._has_ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._descriptor, self._reap)

    def send(self, number: int, order: Order, descriptor: int | None = None) -> None:
        """See JobChannel.send."""
        self._channel.send(number, order, descriptor)

    def kill(self) -> None:
        """SIGKILL; it reaches a stopped process too. `on_end` follows, also for one that has just
        ended by itself."""
        if not self._has_ended.done():
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    async def wait(self) -> None:
        """Until the process has ended and `on_end` has been called."""
        await asyncio.shield(self._has_ended)

    def _cut_off(self, reason: str) -> None:
        # A worker that closes its channel is about to end; one that babbles is to.
        log.debug("channel of worker pid=%d: %s", self.pid, reason)
        self.kill()

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        # The end of the channel sends a signal: until it was waited for, the dead process gets it.
        self._channel.read_rest()
        self._channel.close()
        code = self._process.wait()
        os.close(self._descriptor)
        self._has_ended.set_result(None)
        self._on_end(_described(code))


def _spawn(command: WorkerCommand, channel: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command.words(channel.fileno()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd=CODE_ROOT,
        # numpy's library for linear algebra would start a thread for each core, which a worker has
        # no use for and which spin while they start.
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        pass_fds=[channel.fileno(), command.arena],
    )


def _open(process: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise


def _described(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    # Most real-time signals have no name.
    name_by_number = {number.value: number.name for number in signal.Signals}
    return f"killed by {name_by_number.get(-code, f'signal {-code}')}"
