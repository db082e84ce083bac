"""The life of an agent's process: start, end, its socket, and many engines that come and go."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvstore import agent_messages as m
from kvstore.agent.main import AgentFailed, end_by_fault
from kvstore.errors import StoreError
from kvstore.socket_file import SocketFile
from tests.kvstore.admin.command_line import cachalot_here, one_line
from tests.patience import PATIENCE_S

from .agent_process import ROOT, AgentProcess, agent_command, is_running, short_folder
from .arena_runs import SectionedBlocks
from .dying_engines import CHAIN, let_engines_die
from .engine_steps import fill, store, wait_until
from .process_usage import Usage, usage_of

# Start and end ------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    path = short_folder()
    yield path
    shutil.rmtree(path)


def run_to_end(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, cwd=ROOT, check=False
    )


def test_second_agent_on_a_socket_refuses_with_one_line(agent: AgentProcess) -> None:
    ended = run_to_end(*agent_command(agent.cluster_path, agent.socket_path, "--arena", "64MiB"))
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert f"another agent serves it (process {agent.process.pid})" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    agent.status()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--arena", "4000GiB"), "memory: given"),
        (("--arena", "1000001"), "--arena"),
        (("--roles", "cook"), "--roles"),
        (("--entrypoint", "e99"), "--entrypoint"),
        (("--listen", "0.0.0.0:0"), "--listen"),
        (("--entrypoint", "e99", "--listen", "127.0.0.1:0"), "beside --entrypoint"),
        (("--name", ""), "--name"),
    ],
)
def test_agent_says_in_one_line_why_it_does_not_start(
    cluster_path: str, folder: Path, words: tuple[str, ...], said: str
) -> None:
    place = ("--cluster", cluster_path, "--socket", folder / "a.sock")
    ended = cachalot_here("agent", *place, *words, code=2)
    assert said in one_line(ended)
    assert list(folder.iterdir()) == []


def test_agent_saves_what_was_handed_over_before_it_ends(cluster_path: str) -> None:
    blocks = SectionedBlocks(128, seed=18)
    with AgentProcess(cluster_path) as agent:
        workers = agent.workers()
        with agent.engine() as engine:
            namespace = engine.open(blocks.namespace)
            leased = engine.lease(namespace, 128)
            fill(engine.memory(leased, blocks.namespace.layout), blocks)
            request = engine.send(
                m.StoreRun(
                    run=leased.run,
                    keys=b"".join(blocks.keys),
                    first_block=0,
                    ttl_class="chat",
                    deadline_s=20.0,
                )
            )
            wait_until(lambda: engine.status()["arena"]["runs_by_state"]["storing"] == 1)
            agent.process.send_signal(signal.SIGTERM)
            ended = engine.answer(request)
            assert isinstance(ended, m.StoreEnded)
            assert ended.stored == 128
            engine.wait_until_ended()
        assert agent.process.wait(PATIENCE_S) == 0
        assert not agent.socket_path.exists()
        wait_until(lambda: not any(map(is_running, workers)))


def test_killed_agent_is_noticed_and_its_socket_is_taken_over(cluster_path: str) -> None:
    with AgentProcess(cluster_path) as agent:
        workers = agent.workers()
        with agent.engine() as engine:
            engine.socket.settimeout(PATIENCE_S)
            agent.process.kill()
            engine.wait_until_ended()
        wait_until(lambda: not any(map(is_running, workers)))
        agent.process.wait(PATIENCE_S)
        assert agent.process.stdout is not None
        agent.process.stdout.close()
        assert agent.socket_path.exists()
        agent.start()
        assert agent.status()["sessions"]["open"] == 1


def test_socket_is_for_its_user_alone(agent: AgentProcess) -> None:
    assert os.stat(agent.socket_path).st_mode & 0o777 == 0o600


async def test_fault_of_ours_that_nobody_waited_for_ends_the_agent() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.set_exception_handler(partial(end_by_fault, ended))

    def fail(error: Exception) -> None:
        raise error

    loop.call_soon(fail, ConnectionResetError("a peer went away"))
    loop.call_soon(fail, StoreError("a node refused"))
    await asyncio.sleep(0.01)
    assert not ended.done()
    loop.call_soon(fail, AssertionError("a run is free twice"))
    with pytest.raises(AgentFailed, match="a run is free twice"):
        await ended


# Many ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("engines", [300, pytest.param(1_000, marks=pytest.mark.torture)])
def test_hundreds_of_engines_that_are_killed_leave_nothing_behind(
    agent: AgentProcess, engines: int
) -> None:
    with agent.engine() as engine:
        store(engine, engine.open(CHAIN.namespace), CHAIN)
    let_engines_die(agent.socket_path, 200)  # buffers and connections have their size by then
    before = settled_usage(agent)
    let_engines_die(agent.socket_path, engines)
    after = settled_usage(agent)
    assert after.keys() == before.keys(), "a worker had to be started anew"
    for pid, usage in after.items():
        assert abs(usage.descriptors - before[pid].descriptors) <= 2, (before, after)
        assert usage.connections <= 2 * 12 + 1, "two to each node, and the listener"
        assert usage.private_bytes - before[pid].private_bytes < 16 << 20, (before, after)
    status = agent.status()
    assert status["sessions"]["accepted"] > engines
    assert status["fetch"]["given_up"] > 0
    assert status["store"]["stored"] > engines // 10
    assert "Traceback" not in agent.log()


def settled_usage(agent: AgentProcess) -> dict[int, Usage]:
    """Of the agent and its workers by pid, once nobody is there and nothing is under way."""

    def is_settled() -> bool:
        status = agent.status()
        under_way = [
            status[part][name]
            for part, names in (
                ("arena", ("runs", "waiting")),
                ("fetch", ("running", "queued")),
                ("store", ("running", "queued")),
            )
            for name in names
        ]
        return not any(under_way) and bool(status["sessions"]["open"] == 1)

    wait_until(is_settled)
    assert agent.status()["arena"]["leased_bytes"] == 0
    return {pid: usage_of(pid) for pid in (agent.process.pid, *agent.workers())}


def test_agent_goes_on_when_it_has_no_descriptors_left(cluster_path: str) -> None:
    blocks = SectionedBlocks(1, seed=31)
    with AgentProcess(cluster_path, descriptors_max=64) as agent, agent.engine() as engine:
        namespace = engine.open(blocks.namespace)
        idle = []
        for _ in range(80):
            idle.append(socket.socket(socket.AF_UNIX))
            idle[-1].connect(os.fspath(agent.socket_path))
        wait_until(lambda: "cannot accept" in agent.log())
        refused = engine.refusal(m.LeaseRun(namespace=namespace, blocks=1, deadline_s=1.0))
        assert "no descriptor" in refused.what
        assert engine.status()["arena"]["runs"] == 0
        for one in idle:
            one.close()
        wait_until(lambda: engine.status()["sessions"]["open"] == 1)
        assert engine.lease(namespace, 1).blocks == 1
        with agent.engine() as other:
            other.status()


def test_engine_that_reads_no_answers_does_not_hold_up_another(agent: AgentProcess) -> None:
    blocks = SectionedBlocks(16, seed=30)
    with agent.engine() as deaf, agent.engine() as other:
        namespace = deaf.open(blocks.namespace)
        for _ in range(200):
            deaf.send(m.AskStatus())
        deaf.send(m.LeaseRun(namespace=namespace, blocks=4, deadline_s=1.0))
        theirs = other.open(blocks.namespace)
        assert store(other, theirs, blocks).stored == 16


def test_socket_of_a_dead_agent_can_be_taken_by_this_process(cluster_path: str) -> None:
    with AgentProcess(cluster_path) as agent:
        agent.process.kill()
        agent.process.wait(PATIENCE_S)
        with SocketFile(agent.socket_path, os.getpid()) as found:
            assert found.listener.fileno() >= 0
        assert not Path(agent.socket_path).exists()
