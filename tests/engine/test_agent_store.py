"""An engine whose store is the agent of its host: hits through the arena, and life without it."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engine.generate
from engine.llm import LLM, LLMConfig
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import AgentClient, BlockingAgentClient
from tests.engine.command_line import run_here
from tests.engine.conftest import OpenTiny
from tests.engine.waiting import wait_until
from tests.kvstore.agent.agent_process import AgentProcess
from tests.patience import OPERATION_S

PROMPT = [number % 200 + 3 for number in range(5 * 128 + 40)]
FULL_HIT = 5 * 128


@pytest.fixture(scope="module")
def cluster_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("agent-store")
    with LocalCluster.start(folder / "c", nodes=3, k=2, m=1, target_size_bytes=64 << 20) as cluster:
        yield str(cluster.cluster_path)


@pytest.fixture(scope="module")
def served(cluster_path: str) -> Iterator[AgentProcess]:
    with AgentProcess(cluster_path, ("--arena", "8MiB", "--window-memory", "16MiB")) as process:
        yield process


@pytest.fixture
def agent(served: AgentProcess) -> AgentProcess:
    """The agent, running, whatever a test before did to it."""
    served.revive()
    return served


@pytest.fixture
def store(agent: AgentProcess) -> Iterator[BlockingAgentClient]:
    with AgentClient.open(agent.socket_path, name="engine") as client:
        yield client


@pytest.fixture
def llm(open_tiny: OpenTiny, store: BlockingAgentClient, request: pytest.FixtureRequest) -> LLM:
    """An engine that shares blocks with no other test."""
    tenant = f"{os.getpid()}-{request.node.name}"
    return open_tiny(
        store, tenant=tenant, config=LLMConfig(pool_blocks=32, fetch_deadline_s=OPERATION_S)
    )


def ask(llm: LLM) -> tuple[list[int], int]:
    """Tokens of the answer, and the hit, for which there is nothing but the store; returns when all
    is saved or given up."""
    llm.forget_blocks()
    generation = llm.generate(PROMPT, max_tokens=4)
    llm.flush(20)
    return generation.token_ids, generation.hit_tokens


def test_engine_hits_through_the_agent_what_it_saved_through_it(
    llm: LLM, store: BlockingAgentClient
) -> None:
    answer, hit = ask(llm)
    assert hit == 0
    assert store.counters.blocks_saved == 5
    assert ask(llm) == (answer, FULL_HIT)
    wait_until(lambda: store.counters.blocks_fetched == 5)
    assert llm.store_faults.count == 0


def test_engine_goes_on_without_a_killed_agent_and_hits_again_when_it_is_back(
    llm: LLM, store: BlockingAgentClient, agent: AgentProcess
) -> None:
    answer, _ = ask(llm)
    agent.kill()
    again, hit = ask(llm)
    assert (again, hit) == (answer, 0)
    assert llm.store_faults.count > 0
    agent.start()
    wait_until(lambda: store.is_connected)
    assert ask(llm) == (answer, FULL_HIT)


def test_agent_that_dies_during_a_request_costs_its_hit(
    llm: LLM, store: BlockingAgentClient, agent: AgentProcess
) -> None:
    answer, _ = ask(llm)
    # Standing still first, so that the request waits for it when it dies.
    agent.process.send_signal(signal.SIGSTOP)
    killer = threading.Timer(0.2, agent.kill)
    killer.start()
    again, hit = ask(llm)
    killer.join()
    assert (again, hit) == (answer, 0)
    agent.start()
    wait_until(lambda: store.is_connected)
    assert ask(llm) == (answer, FULL_HIT)


def test_engine_goes_on_beside_an_agent_that_stands_still_and_hits_again_when_it_goes_on(
    llm: LLM, store: BlockingAgentClient, agent: AgentProcess
) -> None:
    answer, _ = ask(llm)
    agent.process.send_signal(signal.SIGSTOP)
    assert ask(llm) == (answer, 0)
    # Nobody waits for it any more.
    assert not store.is_connected
    assert ask(llm) == (answer, 0)
    agent.process.send_signal(signal.SIGCONT)
    wait_until(lambda: store.is_connected)
    # The store is asked again when it has rested.
    wait_until(lambda: ask(llm) == (answer, FULL_HIT))


def test_engine_that_begins_before_its_agent_uses_it_when_it_comes(
    open_tiny: OpenTiny, agent: AgentProcess
) -> None:
    agent.kill()
    with AgentClient.open(agent.socket_path) as store:
        llm = open_tiny(store, tenant=f"early {os.getpid()}")
        answer, hit = ask(llm)
        assert (hit, llm.store_faults.count > 0) == (0, True)
        agent.start()
        wait_until(lambda: store.is_connected)
        ask(llm)
        assert ask(llm) == (answer, FULL_HIT)


def generate(tiny_path: Path, agent: AgentProcess, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "engine.generate", "--threads", "1", "--max-tokens", "4"]
    command += ["--model", str(tiny_path), "--agent", str(agent.socket_path), "--json", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate(timeout=50)
    assert (process.returncode, error) == (0, "")
    answer: dict[str, Any] = json.loads(out)
    return answer


@pytest.mark.slow
def test_another_process_hits_through_the_agent(tiny_path: Path, agent: AgentProcess) -> None:
    ask_words = ("--prompt", "The quick brown fox jumps over the lazy dog. " * 12)
    words = ("--model", tiny_path, "--agent", agent.socket_path, "--max-tokens", "4", "--json")
    cold = json.loads(run_here(engine.generate, *words, *ask_words).stdout)
    hit = read_answer(generate(tiny_path, agent, *ask_words))
    assert cold["blocks"]["stored"] > 0
    assert hit["hit_tokens"] == (hit["prompt_tokens"] - 1) // 128 * 128 > 0
    assert (hit["token_ids"], hit["store_errors"]) == (cold["token_ids"], 0)
    # The agent takes back what an engine had once it sees that its connection has ended.
    wait_until(lambda: agent.status()["arena"]["runs"] == 0)


@pytest.mark.slow
def test_command_line_without_its_agent_answers_and_says_so_in_one_line(
    tiny_path: Path, agent: AgentProcess
) -> None:
    agent.kill()
    words = ("--model", tiny_path, "--agent", agent.socket_path, "--max-tokens", "4", "--json")
    done = run_here(engine.generate, *words, "--prompt", "The quick brown fox. " * 30)
    assert done.returncode == 0
    assert json.loads(done.stdout)["store_errors"] > 0
    assert len(done.stderr.splitlines()) == 1
    assert "block store: match failed, going on without it: agent" in done.stderr


def test_store_behind_an_agent_and_on_a_map_are_not_both_to_be_named(tiny_path: Path) -> None:
    stores = ("--agent", "a.sock", "--cluster", "cluster.toml")
    done = run_here(engine.generate, "--prompt", "x", "--model", tiny_path, *stores)
    assert done.returncode == 2
    assert done.stderr == (
        "engine.generate: store: given both --agent and --cluster, expected one of them, or none\n"
    )


@pytest.mark.slow
def test_runs_of_a_killed_engine_return_to_the_arena(tiny_path: Path, agent: AgentProcess) -> None:
    """Killed when its save is under way: the run goes on being saved, then it is free."""
    process = generate(tiny_path, agent, "--prompt", "The lazy dog. " * 60)
    wait_until(lambda: agent.status()["arena"]["runs"] > 0 or process.poll() is not None)
    process.kill()
    process.communicate()
    wait_until(lambda: agent.status()["arena"]["runs"] == 0)
