"""An engine worker: puts it together and runs it until it is told to stop.

The only place of the worker that picks the real clock, threads and sockets. When it serves, one
JSON line goes to stdout, and nothing else ever does; events go to stderr.

    SIGTERM                  no new requests; those that run may end within the grace period; the
                             rest moves to other workers, by way of its clients; exit 0
    SIGINT, second SIGTERM   the process ends; clients run their requests again elsewhere
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from kvstore.event_log import set_up_logging
from kvstore.metrics.server import MetricsServer

from ..errors import DeviceLost, EngineError
from ..garbage import freeze_loaded_objects
from ..given_paths import check_agent_path, check_model_path
from ..model_identity import identity_of
from ..scheduler.cost import describe_mismatch
from ..threads import set_threads_for
from .address import WorkerAddress
from .connection import ConnectionBounds
from .listening import Listening, listen
from .metric_table import ENGINE_TABLE
from .options import Role, WorkerOptions
from .outbox import LoopOutbox
from .server import WorkerServer

if TYPE_CHECKING:
    from .assembly import WorkerEngine
    from .engine_thread import EngineThread

log = logging.getLogger(__name__)

HAND_OVER_DEADLINE_S = 15.0
"""From the end of the grace period until all tickets are out; what is left then is lost to its
client, which runs it again."""
LAST_ANSWERS_S = 5.0
STOP_DEADLINE_S = 5.0
STATUS_DEADLINE_S = 1.0

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Why a connection cannot be accepted now; it waits, and asyncio tries again in a second."""


class WorkerFailed(EngineError):
    """Something of the worker's own has failed; its traceback is in the log."""


class _Stop:
    """Signals, as the loop sees them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.drain = asyncio.Event()
        self.at_once = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, self._note_term)
        loop.add_signal_handler(signal.SIGINT, self._note_interrupt)

    def _note_term(self) -> None:
        if self.drain.is_set():
            self.at_once.set()
        self.drain.set()

    def _note_interrupt(self) -> None:
        self.drain.set()
        self.at_once.set()


def run_worker(options: WorkerOptions) -> int:
    """Runs a worker; returns the exit code of the process.

    Raises EngineError, StoreError, OSError if it cannot start, WorkerFailed for a fault of its own:
    an engine whose books may be wrong must not go on.
    """
    set_up_logging(time.monotonic, is_json=options.is_log_json)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_at_once)
    with ExitStack() as stack:
        # Before the tensor library and the model, which take a while: what can be wrong with the
        # options is said at once.
        listening = stack.enter_context(listen(options.listen))
        metrics = None
        if options.metrics is not None:
            server = MetricsServer.listen("--metrics", options.metrics, ENGINE_TABLE)
            metrics = stack.enter_context(server)
        check_model_path(options.model)
        if options.agent is not None:
            check_agent_path(options.agent)
        with _held_signals():
            from .assembly import open_engine

        _warn_of_other_cost(options, set_threads_for(options.model, options.threads))
        engine = stack.enter_context(open_engine(options, clock=time.monotonic))
        freeze_loaded_objects()
        with asyncio.Runner() as runner:
            runner.run(_serve(options, engine, listening, metrics))
        # The loop has put back Python's own handler, which would end in a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    log.info("stopped engine=%s", options.name)
    return 0


def _stop_at_once(number: int, _frame: object) -> NoReturn:
    """Before it serves, a worker has nothing to finish."""
    raise SystemExit(0)


@contextmanager
def _held_signals() -> Iterator[None]:
    """Signals that end a worker come behind this block: the tensor library's import is aborted by
    whatever is raised in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _serve(
    options: WorkerOptions,
    engine: WorkerEngine,
    listening: Listening,
    metrics: MetricsServer | None,
) -> None:
    from .engine_thread import EngineThread
    from .request_line import RequestLine

    loop = asyncio.get_running_loop()
    stop = _Stop(loop)
    fault: asyncio.Future[None] = loop.create_future()
    loop.set_exception_handler(partial(_end_by_fault, fault))
    thread = EngineThread(
        engine.engine,
        engine.hand_overs,
        RequestLine(options.queue, clock=time.monotonic),
        ends_after_prefill=options.role is Role.PREFILL,
        on_end=lambda error: _note_end(loop, fault, error),
        clock=time.monotonic,
    )
    describe = partial(
        _describe,
        options,
        engine,
        thread,
        model=_describe_model(options, engine),
        since_s=time.monotonic(),
    )
    server = WorkerServer(thread, describe=describe, bounds=_choose_bounds(options))
    thread.start(LoopOutbox(loop, server.deliver).post)
    read_status = partial(_read_status, loop, server)
    try:
        await server.listen(listening.listener)
        listening.note_serving()
        with nullcontext() if metrics is None else metrics.serve(read_status):
            _announce(options, listening.listener)
            await _first_of(stop.drain.wait(), fault)
            await _first_of(_drain(options, server, thread), stop.at_once.wait(), fault)
    finally:
        server.close()
        if not thread.stop(STOP_DEADLINE_S):
            _give_up(options)


def _warn_of_other_cost(options: WorkerOptions, threads: int) -> None:
    if options.cost is None:
        return
    problem = describe_mismatch(
        options.cost, model=options.model, device=options.device, threads=threads
    )
    if problem is not None:
        log.warning("%s", problem)


def _choose_bounds(options: WorkerOptions) -> ConnectionBounds:
    """What one client may cost."""
    if options.read_deadline_s is None:
        return ConnectionBounds()
    return ConnectionBounds(unsent_s=options.read_deadline_s)


def _give_up(options: WorkerOptions) -> NoReturn:
    """End the process as it is: nothing can be tidied up beside a step that goes on."""
    log.critical("the engine hangs in a step: engine=%s", options.name)
    logging.shutdown()
    os._exit(1)


async def _drain(options: WorkerOptions, server: WorkerServer, thread: EngineThread) -> None:
    """Take nothing more, let requests end, then send away what still runs."""
    server.is_draining = True
    log.info("draining engine=%s requests=%d", options.name, server.requests)
    if not await server.wait_until_idle(options.grace_s):
        log.info("moving engine=%s requests=%d", options.name, server.requests)
        thread.hand_over_all()
        await server.wait_until_idle(HAND_OVER_DEADLINE_S)
    await server.wait_until_read(LAST_ANSWERS_S)


async def _first_of(*waits: Awaitable[object]) -> None:
    """Until one of them ends; raises its error. The others are given up, but for futures."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            if isinstance(task, asyncio.Task):
                task.cancel()
    for task in done:
        task.result()


def _note_end(
    loop: asyncio.AbstractEventLoop, fault: asyncio.Future[None], error: BaseException | None
) -> None:
    """The engine's thread ends, in that thread."""
    if error is None:
        return
    # Of a lost device the traceback ends at whatever call was the first to meet it.
    log.error("the engine has failed", exc_info=None if isinstance(error, DeviceLost) else error)
    if not loop.is_closed():
        loop.call_soon_threadsafe(_fail, fault, error)


def _fail(fault: asyncio.Future[None], error: BaseException) -> None:
    if not fault.done():
        said = str(error) if isinstance(error, EngineError) else repr(error)
        fault.set_exception(WorkerFailed(f"the worker has failed: {said}"))


def _end_by_fault(
    fault: asyncio.Future[None], loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """Something that nobody waited for has failed: a fault of ours, unless a connection did."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
        log.error("cannot accept: %s", error.strerror)
        return
    loop.default_exception_handler(context)
    if error is not None and not isinstance(error, OSError):
        _fail(fault, error)


def _read_status(loop: asyncio.AbstractEventLoop, server: WorkerServer) -> dict[str, Any]:
    """The status document, for other threads. Raises TimeoutError if the loop does not come to it
    in time."""

    async def read() -> dict[str, Any]:
        return server.status()

    asked = asyncio.run_coroutine_threadsafe(read(), loop)
    try:
        return asked.result(STATUS_DEADLINE_S)
    finally:
        asked.cancel()


def _describe_model(options: WorkerOptions, engine: WorkerEngine) -> dict[str, str]:
    """Which model it serves, and in which namespace its blocks are."""
    namespace = engine.engine.runner.namespace
    identity = identity_of(namespace, options.model)
    return identity.to_document() | {"namespace": namespace.namespace_id.hex()}


def _describe(
    options: WorkerOptions,
    engine: WorkerEngine,
    thread: EngineThread,
    *,
    model: dict[str, str],
    since_s: float,
) -> dict[str, Any]:
    """The worker's part of the status document. `since_s`: when it began to serve."""
    own = {
        "name": options.name,
        "role": options.role.value,
        "model": model,
        "pid": os.getpid(),
        "uptime_s": round(time.monotonic() - since_s, 3),
        "store_errors": engine.faults.count,
        "transfer_errors": engine.faults.transfers,
        "blocks_move": None if engine.mover is None else engine.mover.describe(),
    }
    return own | thread.describe()


def _announce(options: WorkerOptions, listener: socket.socket) -> None:
    """The ready line. Whoever started the worker may have gone away: it serves all the same."""
    listen = str(options.listen)
    if options.listen.path is None:
        listen = str(WorkerAddress(host=options.listen.host, port=listener.getsockname()[1]))
    role = options.role.value
    log.info("serving engine=%s role=%s listen=%s", options.name, role, listen)
    line = {"engine": options.name, "role": role, "listen": listen, "pid": os.getpid()}
    try:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("nobody reads the ready line: %s", error.strerror or error)
