"""`gc_worker`: puts the worker beside one storage node together and runs it until SIGTERM.

The only place of the worker that picks the real clock, chance and files. When its loops run, one
JSON line with its node, pid and control address goes to stdout, and nothing else ever does; events
go to stderr.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NoReturn

from kvstore.admin.control.serving import (
    adopt_control_listener,
    check_control_address,
    listen_for_control,
    serve_control,
)
from kvstore.cluster.source import FileMapSource
from kvstore.errors import InvalidArgument, StoreError
from kvstore.event_log import set_up_logging
from kvstore.identity import check_package_identity
from kvstore.node.clock import SystemClock
from kvstore.token_file import read_token_file

from . import drain, policy_sync, redundancy_pass, scrub, watch
from .arguments import CONTROL_OF_MAP, WorkerArguments, parse_arguments
from .batch_eviction import StepHook, no_hook
from .cluster_link import ClusterLink
from .context import WorkerContext
from .eviction import Eviction
from .folder_locks import locked_folders
from .handle import Handle
from .sampling import HistorySampler
from .supervision import Loop, LoopFailed, run_loops

log = logging.getLogger(__name__)


def main(words: Sequence[str] | None = None, *, on_step: StepHook = no_hook) -> int:
    """Run a worker; returns the exit code (`arguments.EXIT_CODES`). `on_step` is told each step of
    an eviction."""
    check_package_identity()
    arguments = parse_arguments(sys.argv[1:] if words is None else words)
    set_up_logging(SystemClock().monotonic_s, is_json=arguments.is_log_json)
    # Each loop says once when a node does not answer; the channel would at each attempt.
    logging.getLogger("kvstore.client.channel").setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_at_once)
    try:
        asyncio.run(_run(arguments, on_step))
    except StoreError as error:
        sys.stderr.write(f"gc_worker: {error}\n")
        return error.exit_code
    except LoopFailed as error:
        sys.stderr.write(f"gc_worker: ended by a fault: {error}\n")
        return 1
    return 0


async def _run(arguments: WorkerArguments, on_step: StepHook) -> None:
    _raise_descriptor_limit()
    clock = SystemClock()
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        token = None if arguments.token_path is None else read_token_file(arguments.token_path)
        link = ClusterLink(FileMapSource(arguments.cluster_path), loop, clock.monotonic_s)
        stack.callback(link.close)
        context = WorkerContext(
            node=arguments.node,
            cluster_path=arguments.cluster_path,
            link=link,
            clock=clock,
            sleep=asyncio.sleep,
            rng=random.Random(),
        )
        _check_node(context)
        folders = [context.folder(target) for target in context.own_targets()]
        stack.enter_context(locked_folders(folders, os.getpid()))
        listener = _listen(arguments, context)
        await _serve(context, listener, token, on_step)


def _raise_descriptor_limit() -> None:
    """Strangers may open connections to the control API faster than they are closed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _check_node(context: WorkerContext) -> None:
    known = context.link.map.node_by_name
    if context.node not in known:
        listed = ", ".join(sorted(known))
        raise InvalidArgument("--node", given=context.node, expected=f"one of the map's: {listed}")


def _listen(arguments: WorkerArguments, context: WorkerContext) -> socket.socket | None:
    """The socket of the control API, None if there is to be none."""
    if arguments.control_fd is not None:
        return adopt_control_listener(arguments.control_fd)
    address = arguments.control
    if address is None:
        return None
    if address == CONTROL_OF_MAP:
        known = context.link.map.node_by_name[context.node].control
        if known is None:
            expected = f"a `control` address of node {context.node!r} in the cluster map"
            raise InvalidArgument("--control", given=repr(CONTROL_OF_MAP), expected=expected)
        address = known
    host, port = check_control_address(address, is_remote_allowed=arguments.is_control_remote)
    return listen_for_control(host, port)


async def _serve(
    context: WorkerContext, listener: socket.socket | None, token: str | None, on_step: StepHook
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    eviction = Eviction(context, on_step=on_step)
    sampler = HistorySampler(context)
    loops: dict[str, Loop] = {
        "watch": lambda: watch.run(context),
        "policy": lambda: policy_sync.run(context),
        "eviction": eviction.run,
        "scrub": lambda: scrub.run(context),
        "redundancy": lambda: redundancy_pass.run(context),
        "drain": lambda: drain.run(context),
        "history": sampler.run,
    }
    if listener is not None and token is not None:
        handle = Handle(context=context, eviction=eviction, sampler=sampler, pid=os.getpid())
        socket_of_control, secret = listener, token
        loops["control"] = lambda: serve_control(socket_of_control, handle, secret)
    address = None if listener is None else _address_of(listener)
    log.info("looking after node=%s pid=%d control=%s", context.node, os.getpid(), address)
    _say_ready({"node": context.node, "pid": os.getpid(), "control": address})
    await run_loops(context, loops, stop)
    log.info("stopped node=%s", context.node)


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say_ready(content: Mapping[str, object]) -> None:
    """Write the ready line. Whoever started the worker may have gone away: it goes on."""
    try:
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("nobody reads the ready line: %s", error.strerror or error)
        # The interpreter flushes stdout once more when it ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _stop_at_once(number: int, _frame: object) -> NoReturn:
    """Before its loops run, a worker has nothing to finish."""
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
