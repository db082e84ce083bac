"""The life of an agent's process: start, end, its socket, and many engines that come and go."""

from __future__ import annotations

import asyncio
import os
import random
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
from kvstore.agent.socket_file import SocketFile
from kvstore.errors import StoreError

from .agent_process import ROOT, AgentProcess, agent_command, is_running, short_folder
from .arena_runs import SectionedBlocks
from .engine_steps import fetch_request, fill, store, wait_until

SESSIONS_MANY = 1_000

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
    ],
)
def test_agent_says_in_one_line_why_it_does_not_start(
    cluster_path: str, folder: Path, words: tuple[str, ...], said: str
) -> None:
    ended = run_to_end(*agent_command(cluster_path, folder / "a.sock", *words))
    assert ended.returncode in (1, 2)
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not (folder / "a.sock").exists()


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
        assert agent.process.wait(20) == 0
        assert not agent.socket_path.exists()
        wait_until(lambda: not any(map(is_running, workers)))


def test_killed_agent_is_noticed_at_once_and_its_socket_is_taken_over(cluster_path: str) -> None:
    with AgentProcess(cluster_path) as agent:
        workers = agent.workers()
        with agent.engine() as engine:
            engine.socket.settimeout(5.0)
            agent.process.kill()
            engine.wait_until_ended()
        wait_until(lambda: not any(map(is_running, workers)))
        agent.process.wait(5)
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
def test_thousand_engines_that_die_leave_nothing_behind(agent: AgentProcess) -> None:
    blocks = SectionedBlocks(4, seed=19)
    with agent.engine() as engine:
        store(engine, engine.open(blocks.namespace), blocks)

    def live_and_die(number: int) -> None:
        engine = agent.engine()
        namespace = engine.open(blocks.namespace)
        leased = engine.lease(namespace, 4)
        if number % 4 == 0:
            engine.send(fetch_request(leased.run, blocks))
        if number % 4 == 1:
            engine.send(m.LeaseRun(namespace=namespace, blocks=5_000, deadline_s=30.0))
        if number % 4 == 2:
            engine.socket.sendall(b"\x10\x00")
        engine.close()

    for number in range(50):
        live_and_die(number)
    wait_until(lambda: agent.status()["arena"]["runs"] == 0)
    descriptors, memory_bytes = agent.descriptor_count(), agent.memory_bytes()
    for number in range(SESSIONS_MANY):
        live_and_die(number)
    wait_until(lambda: agent.status()["arena"]["runs"] == 0)
    status = agent.status()
    assert status["arena"]["leased_bytes"] == 0
    assert status["arena"]["waiting"] == 0
    assert status["sessions"]["open"] == 1
    assert abs(agent.descriptor_count() - descriptors) <= 2
    assert agent.memory_bytes() - memory_bytes < 4 << 20


def test_agent_survives_noise_of_every_kind_within_its_memory(cluster_path: str) -> None:
    rng = random.Random(7)
    with AgentProcess(cluster_path, words=("--roles", "check")) as agent:
        with agent.engine() as engine:
            engine.status()
        descriptors, memory_bytes = agent.descriptor_count(), agent.memory_bytes()
        valid = [
            m.pack_message(1, m.Hello(version=1, client="noise")),
            m.pack_message(2, m.AskStatus()),
            m.pack_message(3, m.ReleaseRun(run=1)),
        ]
        for number in range(300):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(os.fspath(agent.socket_path))
                data = bytearray(b"".join(valid))
                if number % 3 == 0:
                    data = bytearray(rng.randbytes(rng.randrange(1, 20_000)))
                elif number % 3 == 1:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                else:
                    del data[rng.randrange(len(data)) :]
                try:
                    client.sendall(data)
                except (BrokenPipeError, ConnectionResetError):
                    continue
        with agent.engine() as engine:
            assert engine.status()["agent"]
        assert agent.process.poll() is None
        assert agent.descriptor_count() <= descriptors + 2
        assert agent.memory_bytes() - memory_bytes < 8 << 20
        assert "Traceback" not in agent.log()


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


def test_stopped_engine_does_not_hold_up_another(agent: AgentProcess) -> None:
    blocks = SectionedBlocks(16, seed=30)
    with agent.engine() as stopped, agent.engine() as other:
        # It asks and asks, and reads no answer: for the agent that is what a stopped one does.
        namespace = stopped.open(blocks.namespace)
        for _ in range(200):
            stopped.send(m.AskStatus())
        stopped.send(m.LeaseRun(namespace=namespace, blocks=4, deadline_s=1.0))
        theirs = other.open(blocks.namespace)
        assert store(other, theirs, blocks).stored == 16


def test_socket_of_a_dead_agent_can_be_taken_by_this_process(cluster_path: str) -> None:
    with AgentProcess(cluster_path) as agent:
        agent.process.kill()
        agent.process.wait(5)
        with SocketFile(agent.socket_path, os.getpid()) as found:
            assert found.listener.fileno() >= 0
        assert not Path(agent.socket_path).exists()
