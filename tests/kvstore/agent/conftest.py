"""An agent for each file of tests that wants one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .agent_process import AgentProcess, short_folder
from .raw_engine import RawEngine


@pytest.fixture(scope="module")
def agent(cluster_path: str) -> Iterator[AgentProcess]:
    with AgentProcess(cluster_path) as process:
        yield process


@pytest.fixture
def engine(agent: AgentProcess) -> Iterator[RawEngine]:
    with agent.engine() as engine:
        yield engine


@pytest.fixture
def path() -> Iterator[Path]:
    """Of a socket."""
    folder = short_folder()
    yield folder / "a.sock"
    shutil.rmtree(folder)
