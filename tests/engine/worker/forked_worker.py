"""What runs in the process of a worker: the worker, and perhaps a fault that a test wants."""

import os
import signal
import sys
import time
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

from engine.handover.arrival import Pickup
from engine.handover.ticket import SentRun
from engine.llm_engine import LLMEngine
from engine.request import TokenEvent
from engine.threads import set_thread_count
from engine.worker import main as worker_main
from engine.worker.options import WorkerOptions
from kvstore.client import ArenaRun
from kvstore.key import Namespace

Fault: TypeAlias = Literal["dies", "hangs", "killed as it takes", "killed as it attaches"]
"""The engine dies or hangs in the first step that has a request. The process is killed when both
runs of a sequence from elsewhere are its own; or when all of that has been copied and unpacked."""


RUNS_OF_A_SEQUENCE = 2
"""Blocks and state."""


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
    match fault:
        case "dies" | "hangs":
            _break_step(fault)
        case "killed as it takes":
            _die_after_takes(RUNS_OF_A_SEQUENCE)
        case "killed as it attaches":
            LLMEngine.attach = _die  # type: ignore[method-assign, assignment]


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


def _die_after_takes(runs: int) -> None:
    sound_take, taken = Pickup._take, count(1)

    def take(
        pickup: Pickup, what: str, namespace: Namespace, sent: SentRun, blocks: int
    ) -> ArenaRun:
        run = sound_take(pickup, what, namespace, sent, blocks)
        if next(taken) == runs:
            _die()
        return run

    Pickup._take = take  # type: ignore[method-assign, assignment]


def _die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it goes on")
