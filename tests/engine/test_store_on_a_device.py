"""An engine over nodes, by the agent of its host: hits in a pool on the host, and on a GPU by its
movers, answer as a cold run does, also with nodes down."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.engine_config import EngineConfig
from engine.kv.mover import SectionMover
from engine.kv.open_mover import open_mover
from engine.llm_engine import LLMEngine
from engine.load import LoadedRunner, load_runner
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.request_report import RequestReport
from engine.runners.v41_runner import farthest_hit
from engine.sinks.agent_sink import AgentSink
from engine.sources.agent_source import AgentSource
from engine.store_faults import StoreFaults
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import AgentClient, BlockingAgentClient
from tests.engine.kv.counting_rebuilder import CountingRebuilder
from tests.kvstore.agent.agent_process import AgentProcess
from tests.patience import OPERATION_S

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[2] / "models" / "v41-mini"
K, M = 4, 2
STOPPED = ("n02", "n05")
PROMPT = random.Random(5).choices(range(3, 2000), k=6 * 128 + 40)
HIT = farthest_hit(len(PROMPT))
FIRST_TURN = PROMPT[: HIT + 1]
"""Behind whose blocks window state is kept."""

DEVICES = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["host", "gpu"]
)


@dataclass
class Host:
    """A model, a client of the agent, and what moves blocks between them."""

    runner: ModelRunner
    client: BlockingAgentClient
    mover: SectionMover
    rebuilder: CountingRebuilder | None

    def answer(self, prompt_ids: list[int], *, has_store: bool) -> tuple[list[int], RequestReport]:
        """Of an engine that has nothing but the store; all is saved when it returns."""
        self.runner.pool.memory.fill_(0x5A)
        parts: dict[str, Any] = {
            "namespace": self.runner.namespace,
            "pool": self.runner.pool,
            "window_layout": self.runner.window_layout,
            "faults": StoreFaults(),
            "clock": time.monotonic,
            "mover": self.mover,
        }
        source = AgentSource(self.client, **parts, rebuilder=self.rebuilder) if has_store else None
        sink = AgentSink(self.client, **parts) if has_store else None
        engine = LLMEngine(
            self.runner, source=source, sink=sink, config=EngineConfig(), clock=time.monotonic
        )
        try:
            token_ids: list[int] = []
            report: RequestReport | None = None
            for event in engine.stream(
                Request(request_id="r", prompt_ids=prompt_ids, max_tokens=8)
            ):
                token_ids += event.token_ids
                report = event.report
            assert sink is None or sink.flush(OPERATION_S)
        finally:
            engine.close()
        assert report is not None
        return token_ids, report


@contextmanager
def host_of(loaded: LoadedRunner, agent: AgentProcess) -> Iterator[Host]:
    runner = loaded.runner
    with (
        AgentClient.open(agent.socket_path, name="engine") as client,
        open_mover(
            runner.pool, runner.namespace.layout, lambda: client.arena, clock=time.monotonic
        ) as opened,
    ):
        rebuilder = None
        if not runner.pool.is_host:
            # Here: what it needs is an optional package.
            from engine.kv.cuda_rebuild import GpuRebuilder, ShardKernels

            kernels = ShardKernels(runner.pool.device, runner.pool.block_bytes, k=K, m=M)
            rebuilder = CountingRebuilder(GpuRebuilder(runner.pool, opened.mover, kernels))
        yield Host(runner, client, opened.mover, rebuilder)


@DEVICES
def test_hit_answers_as_a_cold_run_also_with_nodes_down(device: str, tmp_path: Path) -> None:
    loaded = load_runner(MODEL, pool_blocks=24, state_slots=4, device=device)
    with (
        LocalCluster.start(
            tmp_path / "c", nodes=K + M, k=K, m=M, target_size_bytes=64 << 20
        ) as cluster,
        AgentProcess(
            str(cluster.cluster_path), ("--arena", "8MiB", "--window-memory", "16MiB")
        ) as agent,
        host_of(loaded, agent) as host,
    ):
        alone, _ = host.answer(PROMPT, has_store=False)
        _, cold = host.answer(FIRST_TURN, has_store=True)
        assert (cold.hit_tokens, cold.receipt.summary().failed) == (0, 0)
        tokens, hit = host.answer(PROMPT, has_store=True)
        assert (hit.hit_tokens, hit.replay_tokens, tokens) == (HIT, 0, alone)
        assert host.rebuilder is None or host.rebuilder.blocks == 0
        for node in STOPPED:
            cluster.stop_node(node)
        tokens, hit = host.answer(PROMPT, has_store=True)
        assert (hit.hit_tokens, hit.replay_tokens, tokens) == (HIT, 0, alone)
        assert host.rebuilder is None or host.rebuilder.blocks > 0
