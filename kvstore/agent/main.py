"""The agent of a compute host: puts it together and runs it until SIGTERM or SIGINT.

The only place of the agent that picks the real clock, chance, files and sockets. When it serves,
one JSON line with its name, socket, address and pid goes to stdout, and nothing else ever does;
events go to stderr. `cachalot agent` is its command line (`kvstore.admin.agent_command`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn, TypeAlias

from ..agent_messages import TICKET_BYTES
from ..client.store_client import StoreClient
from ..event_log import set_up_logging
from ..identity import DISTRIBUTION
from ..node.clock import SystemClock
from ..socket_file import SocketFile
from .assembly import Agent, AgentPlace, open_arena
from .fault import is_fault
from .memory_check import check_memory, read_memory_left
from .options import AgentOptions, Role, fit_name, role_names
from .peer_listener import listen_for_peers

log = logging.getLogger(__name__)

StatusReader: TypeAlias = Callable[[], dict[str, Any]]
"""Gives the agent's status document, from any thread but the loop's; raises TimeoutError if the
agent does not come to it within a second."""
Companion: TypeAlias = Callable[[StatusReader], AbstractContextManager[None]]
"""Something that runs beside a serving agent, such as its metrics; entered once it serves."""

STATUS_DEADLINE_S = 1.0
INSTANCE_BITS = 52
"""What every language's numbers hold."""


class AgentFailed(Exception):
    """A part of the agent ended by an error that is nobody else's; it is in the log."""


def run_agent(options: AgentOptions, companion: Companion | None = None) -> int:
    """Runs an agent; returns the exit code of the process, 1 after a fault of ours.

    Raises StoreError if it cannot start.
    """
    set_up_logging(SystemClock().monotonic_s, is_json=options.is_log_json)
    # The agent's own lines say what a node that is down costs; this one would at each attempt.
    logging.getLogger("kvstore.client.channel").setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_at_once)
    with asyncio.Runner() as runner:
        try:
            runner.run(_run(options, companion))
        except AgentFailed as error:
            sys.stderr.write(f"cachalot agent: ended by a fault: {error}\n")
            return 1
    return 0


async def _run(options: AgentOptions, companion: Companion | None) -> None:
    window_bytes = options.window_memory_bytes if Role.WINDOW in options.roles else 0
    check_memory(options.arena_bytes if options.has_arena else 0, window_bytes, read_memory_left())
    _raise_descriptor_limit()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(StoreClient.connect(options.cluster_path))
        socket_file = stack.enter_context(SocketFile(options.socket_path, os.getpid()))
        listener = stack.enter_context(listen_for_peers(options, store.map))
        arena = stack.enter_context(open_arena(options.arena_bytes)) if options.has_arena else None
        place = AgentPlace(
            name=options.name or options.entrypoint or fit_name(socket.gethostname()),
            pid=os.getpid(),
            uid=os.geteuid(),
            version=_version(),
            instance=secrets.randbits(INSTANCE_BITS),
            make_ticket=partial(secrets.token_bytes, TICKET_BYTES),
            loop=asyncio.get_running_loop(),
            clock=time.monotonic,
            sleep=asyncio.sleep,
            socket_file=socket_file,
            peer_listener=listener,
            arena=arena,
        )
        socket_file.keep_lock()
        await _serve(Agent(options, place, store), companion)


async def _serve(agent: Agent, companion: Companion | None) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _resolve, ended)
    loop.set_exception_handler(partial(end_by_fault, ended))
    reader = partial(_read_status, agent, loop)
    try:
        async with asyncio.TaskGroup() as group:
            await agent.start(group)
            with nullcontext() if companion is None else companion(reader):
                _announce(agent)
                await ended
                await agent.stop()
    except BaseExceptionGroup as errors:
        log.error("the agent ends by a fault", exc_info=errors)
        raise AgentFailed(repr(errors.exceptions[0])) from errors
    finally:
        await agent.close()
    log.info("stopped agent=%s", agent.name)


def _announce(agent: Agent) -> None:
    options = agent.options
    log.info(
        "serving agent=%s roles=%s socket=%s address=%s pid=%d",
        agent.name,
        ",".join(role_names(options.roles)),
        options.socket_path,
        agent.address,
        agent.pid,
    )
    _say_ready(
        {
            "agent": agent.name,
            "socket": str(options.socket_path),
            "address": agent.address,
            "pid": agent.pid,
        }
    )


def _resolve(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def end_by_fault(
    ended: asyncio.Future[None], loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """What nobody waited for has failed. An operating fault is told; all else is a fault of ours,
    and an agent whose books may be wrong must not go on."""
    loop.default_exception_handler(context)
    error = context.get("exception")
    if is_fault(error) and not ended.done():
        ended.set_exception(AgentFailed(repr(error)))


def _read_status(agent: Agent, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    async def read() -> dict[str, Any]:
        return agent.status()

    return asyncio.run_coroutine_threadsafe(read(), loop).result(STATUS_DEADLINE_S)


def _say_ready(content: Mapping[str, object]) -> None:
    """Write the ready line. Whoever started the agent may have gone away: it serves all the
    same."""
    try:
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("nobody reads the ready line: %s", error.strerror or error)
        # The interpreter flushes stdout once more when it ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _raise_descriptor_limit() -> None:
    """Sessions, runs and connections each take a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that was not installed


def _stop_at_once(number: int, _frame: object) -> NoReturn:
    """Before it serves, an agent has nothing to finish."""
    raise SystemExit(0)
