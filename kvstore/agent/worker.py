"""A worker of the agent: `python -m kvstore.agent.worker`, a process that moves blocks between the
nodes and the arena. Started by the agent only, which hands it its two descriptors.

It picks the real clocks, and lives as long as its channel: when the agent is gone, however it went,
the kernel ends the worker, and would the kernel not, the end of the channel does. Nothing is lost
with it but the jobs it had.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ..arena.region import ArenaRegion
from ..client.store_client import StoreClient
from ..cluster.source import FileMapSource
from ..errors import StoreError
from ..event_log import set_up_logging
from ..identity import check_package_identity
from ..node.clock import SystemClock
from .fault import is_fault
from .job_channel import JobChannel
from .job_runner import JobRunner
from .jobs import Finish, OrderMessage, Started, StartFailed, WorkerKind, order_decoder, pack

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


class _End(Enum):
    """Why a worker ends."""

    FINISHED = "finished"
    CUT_OFF = "cut off"
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArguments:
    """The command line of a worker."""

    channel_fd: int
    arena_fd: int
    cluster_path: Path
    kind: WorkerKind
    niceness: int
    is_log_json: bool


def main(words: Sequence[str] | None = None) -> int:
    """Run a worker; returns the exit code: 0, that of the error it could not start for, or 1."""
    check_package_identity()
    # Ctrl-C at the terminal is for the agent, which ends its workers when their jobs are done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    arguments = parse_arguments(sys.argv[1:] if words is None else words)
    set_up_logging(SystemClock().monotonic_s, is_json=arguments.is_log_json)
    # Whoever asks is told how many blocks came; the reasons are in the counters.
    logging.getLogger("kvstore.client").setLevel(logging.WARNING)
    _raise_descriptor_limit()
    if arguments.niceness:
        os.nice(arguments.niceness)
    with socket.socket(fileno=arguments.channel_fd) as channel:
        try:
            end = asyncio.run(_run(arguments, channel.dup()))
        except StoreError as error:
            channel.setblocking(True)
            channel.sendall(pack(0, StartFailed(problem=str(error))))
            return error.exit_code
    return 1 if end is _End.FAULT else 0


def parse_arguments(words: Sequence[str]) -> WorkerArguments:
    """Mistakes end the process with code 2: only our own agent writes this command line."""
    parser = argparse.ArgumentParser(prog="kvstore.agent.worker")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--arena-fd", type=int, required=True)
    parser.add_argument("--cluster", type=Path, required=True)
    parser.add_argument("--kind", choices=[kind.value for kind in WorkerKind], required=True)
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--log-json", action="store_true")
    found = parser.parse_args(words)
    return WorkerArguments(
        channel_fd=found.channel_fd,
        arena_fd=found.arena_fd,
        cluster_path=found.cluster,
        kind=WorkerKind(found.kind),
        niceness=found.niceness,
        is_log_json=found.log_json,
    )


def _die_with_parent() -> None:
    """SIGKILL when the thread of the agent that started us ends: it reaches a stopped process too.

    Was the agent dead before this call, the channel is at its end already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("prctl: %s", os.strerror(ctypes.get_errno()))


def _raise_descriptor_limit() -> None:
    """A connection for each node, and a waker for each job."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Life:
    """A worker serves until the first reason to end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ended: asyncio.Future[_End] = loop.create_future()
        loop.set_exception_handler(self._look_at_error)

    async def wait(self) -> _End:
        return await self._ended

    def end(self, reason: _End) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    def end_cut_off(self, how: str) -> None:
        log.info("the channel ended: %s", how)
        self.end(_End.CUT_OFF)

    def end_by_fault(self, error: BaseException) -> None:
        log.error("ended by a fault", exc_info=error)
        self.end(_End.FAULT)

    def _look_at_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What nobody waited for has failed: a job may be lost, and the agent would not know."""
        loop.default_exception_handler(context)
        if is_fault(context.get("exception")):
            self.end(_End.FAULT)


async def _run(arguments: WorkerArguments, sock: socket.socket) -> _End:
    """Serve until the channel ends, or SIGTERM. Raises StoreError if that cannot begin."""
    loop = asyncio.get_running_loop()
    life = _Life(loop)

    def take(number: int, order: OrderMessage) -> None:
        if isinstance(order, Finish):
            life.end(_End.FINISHED)
        else:
            runner.take(number, order)

    with ExitStack() as stack:
        stack.callback(sock.close)
        source = FileMapSource(arguments.cluster_path)
        client = StoreClient(source.load(), source=source)
        stack.callback(client.close)
        region = stack.enter_context(_map_arena(arguments.arena_fd))
        sock.setblocking(False)
        channel = JobChannel(
            sock, order_decoder, loop=loop, on_message=take, on_end=life.end_cut_off
        )
        stack.callback(channel.close)
        runner = JobRunner(
            client,
            region,
            cpu_clock=time.process_time,
            report=channel.send,
            take_descriptor=channel.take_descriptor,
            on_fault=life.end_by_fault,
        )
        loop.add_signal_handler(signal.SIGTERM, life.end, _End.CUT_OFF)
        channel.send(0, Started())
        reason = await life.wait()
        await runner.end()
        if reason is _End.FINISHED:
            await client.finish_writes()
        await client.end_background()
    return reason


def _map_arena(descriptor: int) -> ArenaRegion:
    try:
        return ArenaRegion(descriptor)
    except OSError as error:
        raise StoreError(f"the arena cannot be mapped: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
