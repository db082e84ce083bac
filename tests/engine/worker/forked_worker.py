"""What runs in the process of a worker: the worker, and perhaps a fault that a test wants."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

from engine.handover.arrival import Pickup
from engine.handover.departure import Dispatch
from engine.handover.sender import HandoverSender
from engine.llm_engine import LLMEngine
from engine.request import TokenEvent
from engine.threads import set_thread_count
from engine.worker import hand_overs
from engine.worker import main as worker_main
from engine.worker.options import WorkerOptions
from engine.worker.server import WorkerServer
from kvstore.client import BlockingAgentClient

Fault: TypeAlias = Literal[
    "dies",
    "hangs",
    "killed when it has leased",
    "killed when it has copied",
    "killed between its offers",
    "killed when it has offered",
    "killed when its ticket is sent",
    "killed between its takes",
    "killed when it has taken",
    "killed as it attaches",
]
"""The engine dies or hangs in the first step that has a request. The process is killed at a step of
the first hand-over: of one that it sends, or, as it takes, of one that comes; at the last of these
all has been copied and unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL when a method is called for the `call`th time, or has returned from that."""

    owner: type[Any]
    method: str
    call: int
    has_returned: bool = True


# A sequence has two runs, blocks and state.
KILLS = {
    "killed when it has leased": Kill(owner=Dispatch, method="lease", call=2),
    "killed when it has copied": Kill(
        owner=BlockingAgentClient, method="offer_run", call=1, has_returned=False
    ),
    "killed between its offers": Kill(owner=BlockingAgentClient, method="offer_run", call=1),
    "killed when it has offered": Kill(owner=BlockingAgentClient, method="offer_run", call=2),
    "killed when its ticket is sent": Kill(owner=WorkerServer, method="_forget", call=1),
    "killed between its takes": Kill(owner=Pickup, method="_take", call=1),
    "killed when it has taken": Kill(owner=Pickup, method="_take", call=2),
    "killed as it attaches": Kill(owner=LLMEngine, method="attach", call=1, has_returned=False),
}

SHORT_TTL_S = 3.0
"""Of the offers of a worker that is to be killed: what it leaves is not waited for any longer."""


def run_forked(
    options: WorkerOptions, ready: Connection, log_path: Path, fault: Fault | None
) -> NoReturn:
    """Runs the worker; stdout is `ready`, stderr the end of the log. Ends with its exit code."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(ready.fileno(), 1)
    os.dup2(log, 2)
    ready.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    set_thread_count(1)
    if fault is not None:
        _break_engine(fault)
    sys.exit(worker_main.run_worker(options))


def _break_engine(fault: Fault) -> None:
    if fault == "dies" or fault == "hangs":
        _break_step(fault)
        return
    short_lived = partial(HandoverSender, offer_ttl_s=SHORT_TTL_S)
    hand_overs.HandoverSender = short_lived  # type: ignore[assignment, attr-defined]
    _die_at(KILLS[fault])


def _break_step(fault: Fault) -> None:
    sound_step = LLMEngine.step

    def step(engine: LLMEngine, wait_s: float = 0.0) -> list[TokenEvent]:
        if engine.has_requests:
            sys.stderr.write(f"the engine {fault}\n")
            sys.stderr.flush()
            assert fault == "hangs"
            while True:
                time.sleep(1)
        return sound_step(engine, wait_s)

    LLMEngine.step = step  # type: ignore[method-assign, assignment]
    worker_main.STOP_DEADLINE_S = 0.1


def _die_at(kill: Kill) -> None:
    sound, calls = getattr(kill.owner, kill.method), count(1)

    def call(*args: object, **kwargs: object) -> object:
        is_due = next(calls) == kill.call
        if is_due and not kill.has_returned:
            _die()
        result = sound(*args, **kwargs)
        if is_due:
            _die()
        return result

    setattr(kill.owner, kill.method, call)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it goes on")
