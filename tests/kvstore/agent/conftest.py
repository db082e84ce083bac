"""An agent for each file of tests that wants one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .agent_process import AgentProcess
from .raw_engine import RawEngine


@pytest.fixture(scope="module")
def agent(cluster_path: str) -> Iterator[AgentProcess]:
    with AgentProcess(cluster_path) as process:
        yield process


@pytest.fixture
def engine(agent: AgentProcess) -> Iterator[RawEngine]:
    with agent.engine() as engine:
        yield engine
