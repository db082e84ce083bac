"""Real engine workers in processes of their own, and what a client says to them by hand."""

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from engine.client import AnswerReport, ClientDeadlines, EngineClient, EnginePlaces
from engine.client.conversation import converse
from engine.sampling import GREEDY, Sampling
from engine.worker.address import WorkerAddress
from engine.worker.messages import (
    Answer,
    AskStatus,
    HandedOver,
    Request,
    Status,
    Submit,
    pack_tokens,
)
from engine.worker.options import Role, WorkerOptions
from tests.engine.worker.forked_worker import Fault, run_forked

START_S = 60.0
END_S = 40.0
TICKETS_TRIED_MAX = 20

PATIENT = ClientDeadlines(connect_s=30, first_token_s=50, between_tokens_s=50, patience_s=50)
"""For tests in which nobody stands still."""


FORKS = multiprocessing.get_context("forkserver")
# Also pytest: each process of multiprocessing imports the main module of its parent.
FORKS.set_forkserver_preload(["pytest", "tests.engine.worker.preload"])


@dataclass(eq=False)
class WorkerProcess:
    """A worker of `role` at `folder`/NAME.sock. `start`, then `wait_until_ready`."""

    name: str
    role: Role
    folder: Path
    model: Path
    agent: Path | None
    grace_s: float = 0.0
    fault: Fault | None = None
    metrics: str | None = None
    process: ForkServerProcess = field(init=False)
    _ready: Connection = field(init=False)

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(path=self.folder / f"{self.name}.sock")

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self) -> None:
        options = WorkerOptions(
            role=self.role,
            model=self.model,
            listen=self.address,
            agent=self.agent,
            name=self.name,
            pool_blocks=96,
            sequences=8,
            grace_s=self.grace_s,
            metrics=self.metrics,
        )
        self._ready, writer = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(
            target=run_forked, args=(options, writer, self.log_path, self.fault), daemon=True
        )
        self.process.start()
        writer.close()

    def wait_until_ready(self) -> None:
        """Until its ready line is there."""
        has_line = self._ready.poll(START_S)
        line = os.read(self._ready.fileno(), 4096) if has_line else b""
        self._ready.close()
        assert line, self.log_path.read_text()
        assert json.loads(line)["pid"] == self.pid

    @property
    def is_running(self) -> bool:
        return self.process.is_alive()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        """The exit code."""
        self.process.join(END_S)
        assert self.process.exitcode is not None, f"{self.name} goes on"
        return self.process.exitcode

    async def status(self) -> dict[str, Any]:
        (answer,) = await ask(self.address, AskStatus())
        assert isinstance(answer, Status)
        return answer.document


@dataclass(frozen=True, eq=False)
class Site:
    """Nodes, an agent, two prefill and two decode workers, of v41-nano."""

    workers: dict[str, WorkerProcess]
    agent_pid: int
    node_pid: int

    def __getitem__(self, name: str) -> WorkerProcess:
        return self.workers[name]

    def places(self, *names: str) -> EnginePlaces:
        """Those workers, or all."""
        chosen = [self.workers[name] for name in names or self.workers]
        return EnginePlaces(
            prefill=tuple(one.address for one in chosen if one.role is Role.PREFILL),
            decode=tuple(one.address for one in chosen if one.role is Role.DECODE),
        )

    def mend(self) -> None:
        """Let what was stopped go on, and start what has ended."""
        for pid in (self.agent_pid, self.node_pid):
            os.kill(pid, signal.SIGCONT)
        ended = [one for one in self.workers.values() if not one.is_running]
        for one in self.workers.values():
            if one.is_running:
                one.send(signal.SIGCONT)
        for one in ended:
            one.wait()
            one.start()
        for one in ended:
            one.wait_until_ready()

    def close(self) -> None:
        for one in self.workers.values():
            if one.is_running:
                one.send(signal.SIGCONT)
                one.kill()


async def ask(address: WorkerAddress, message: Request) -> list[Answer]:
    """All answers of one worker."""
    async with aclosing(converse(address, message, PATIENT)) as answers:
        return [answer async for answer in answers]


async def ask_for_ticket(worker: WorkerProcess, message: Submit) -> tuple[list[Answer], bytes]:
    """What a prefill worker says, and its ticket. An agent that is short of time gives none."""
    for _ in range(TICKETS_TRIED_MAX):
        answers = await ask(worker.address, message)
        handed = answers[-1]
        assert isinstance(handed, HandedOver), handed
        if handed.ticket is not None:
            return answers, handed.ticket
    raise AssertionError("no ticket came")


async def generate(
    client: EngineClient,
    prompt_ids: Sequence[int],
    max_tokens: int,
    sampling: Sampling = GREEDY,
) -> list[int]:
    """The whole answer; no position is missing or comes twice."""
    found, _ = await generate_with_report(client, prompt_ids, max_tokens, sampling)
    return found


async def generate_with_report(
    client: EngineClient,
    prompt_ids: Sequence[int],
    max_tokens: int,
    sampling: Sampling = GREEDY,
) -> tuple[list[int], AnswerReport]:
    """As `generate`, and what the answer cost."""
    found: list[int] = []
    async for part in client.generate(prompt_ids, max_tokens=max_tokens, sampling=sampling):
        assert part.position == len(found)
        found += part.token_ids
    assert part.report is not None
    return found, part.report


async def repeat_until_moved(answer: Callable[[], Awaitable[AnswerReport]], *, moves: int) -> None:
    """Have an answer given until one went on from worker to worker, so often, and each time with
    its cache. An agent that is short of time gives no ticket; that none ever does is a fault."""
    for _ in range(TICKETS_TRIED_MAX):
        report = await answer()
        if not report.tried:
            assert (report.moves, len(report.engines)) == (moves, moves + 1)
            return
    raise AssertionError(f"it was never handed over: {report.tried}")


def submission(prompt_ids: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY) -> Submit:
    return Submit(
        prompt_ids=pack_tokens(prompt_ids),
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
    )


async def wait_until_status(worker: WorkerProcess, **wanted: object) -> None:
    """Until a worker's status document says so."""
    async with asyncio.timeout(END_S):
        while True:
            found = await worker.status()
            if all(found[name] == value for name, value in wanted.items()):
                return
            await asyncio.sleep(0.01)
