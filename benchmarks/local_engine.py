"""An engine in this process, beside an agent or without a store, whose parts are watched.

For the benchmarks of the engine. Not how an engine is served: that is `engine.worker`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from engine.engine_config import EngineConfig
from engine.kv.mover import SectionMover
from engine.kv.rebuild import Rebuilder
from engine.llm_engine import LLMEngine
from engine.load import find_default_model, load_runner
from engine.model_runner import ModelRunner, Part, WaitForSection, wait_for_nothing
from engine.prefix_source import LoadEvent, PrefixLoad, PrefixSource
from engine.request import Request
from engine.request_report import RequestReport
from engine.sampling import FloatArray
from engine.save_receipt import SaveReceipt
from engine.save_sink import SaveSink
from engine.sinks.agent_sink import AgentSink
from engine.sources.agent_source import DEFAULT_LIMITS, AgentSource
from engine.sources.threaded_source import LoadLimits
from engine.store_faults import StoreFaults
from engine.window_record import WindowRecord
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import AgentClient, BlockingAgentClient

from .busy_time import Span

DEADLINE_S = 30.0
"""For everything that is waited for between measurements."""

STATE_SLOTS = 16

clock = time.perf_counter


class WatchedRunner:
    """A `ModelRunner` that notes when it computed, and when a pass stood still for a section."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.passes: list[Span] = []
        self.waits: list[Span] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._runner, name)

    def compute(
        self, parts: Sequence[Part], *, wait_for_section: WaitForSection = wait_for_nothing
    ) -> list[FloatArray | None]:
        def timed_wait(section: int) -> None:
            begun_s = clock()
            wait_for_section(section)
            self.waits.append((begun_s, clock()))

        begun_s = clock()
        logits = self._runner.compute(parts, wait_for_section=timed_wait)
        self.passes.append((begun_s, clock()))
        return logits

    def forget(self) -> None:
        """Begin to note anew."""
        self.passes.clear()
        self.waits.clear()


class WatchedSource:
    """A `PrefixSource` that keeps its loads, for the events in their outcomes."""

    def __init__(self, source: PrefixSource) -> None:
        self._source = source
        self.loads: list[PrefixLoad] = []

    @property
    def on_change(self) -> Callable[[], None]:
        return self._source.on_change

    @on_change.setter
    def on_change(self, wake: Callable[[], None]) -> None:
        self._source.on_change = wake

    def close(self, deadline_s: float) -> bool:
        return self._source.close(deadline_s)

    def look_up(self, prompt_ids: Sequence[int], keys: Sequence[bytes]) -> PrefixLoad:
        load = self._source.look_up(prompt_ids, keys)
        self.loads.append(load)
        return load

    def take_events(self) -> list[LoadEvent]:
        """Events of the loads since the last call, which must have ended."""
        outcomes = [load.outcome for load in self.loads]
        self.loads.clear()
        return [event for outcome in outcomes if outcome is not None for event in outcome.events]


class WatchedSink:
    """A `SaveSink` that counts the engine's seconds in it."""

    def __init__(self, sink: SaveSink) -> None:
        self._sink = sink
        self.took_s = 0.0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._sink, name)

    def save_blocks(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        ttl_class: str,
        receipt: SaveReceipt,
    ) -> None:
        begun_s = clock()
        self._sink.save_blocks(keys, block_ids, ttl_class=ttl_class, receipt=receipt)
        self.took_s += clock() - begun_s

    def save_window(self, key: bytes, record: WindowRecord) -> None:
        begun_s = clock()
        self._sink.save_window(key, record)
        self.took_s += clock() - begun_s


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """`source` and `sink` are None without a store; `model` is its name in lines of figures."""

    model: str
    engine: LLMEngine
    runner: WatchedRunner
    source: WatchedSource | None
    sink: WatchedSink | None

    def answer(self, request: Request) -> tuple[list[int], RequestReport]:
        """Answer one request, alone."""
        token_ids: list[int] = []
        for event in self.engine.stream(request):
            token_ids += event.token_ids
            report = event.report
        assert report is not None, "the last event of a request has its report"
        return token_ids, report

    def flush(self) -> None:
        """Wait until all that was to be saved is."""
        if self.sink is not None:
            assert self.sink.flush(DEADLINE_S), f"saves took longer than {DEADLINE_S} s"


@contextmanager
def open_local_engine(
    model: str,
    agent_socket: Path | None,
    *,
    pool_blocks: int,
    config: EngineConfig,
) -> Iterator[LocalEngine]:
    """An engine for a GGUF file or a folder ("smollm2": the file in the wheel), closed at the
    end."""
    path = find_default_model() if model == "smollm2" else Path(model)
    loaded = load_runner(path, pool_blocks=pool_blocks, state_slots=STATE_SLOTS)
    with ExitStack() as stack:
        client = None
        if agent_socket is not None:
            client = stack.enter_context(AgentClient.open(agent_socket, name="benchmark"))
        engine = open_engine_over(loaded.runner, path.stem, client, config=config)
        yield stack.enter_context(engine)


@contextmanager
def open_engine_over(
    runner: ModelRunner,
    model: str,
    client: BlockingAgentClient | None,
    *,
    config: EngineConfig,
    mover: SectionMover | None = None,
    rebuilder: Rebuilder | None = None,
    limits: LoadLimits = DEFAULT_LIMITS,
) -> Iterator[LocalEngine]:
    """An engine of a runner that is there, closed at the end: it knows nothing of what the runner's
    pool had before. `mover`, `rebuilder`: for a pool that is not the host's."""
    watched = WatchedRunner(runner)
    source, sink = None, None
    if client is not None:
        parts: dict[str, Any] = {
            "namespace": runner.namespace,
            "pool": runner.pool,
            "window_layout": runner.window_layout,
            "faults": StoreFaults(),
            "clock": clock,
            "mover": mover,
        }
        source = WatchedSource(AgentSource(client, **parts, rebuilder=rebuilder, limits=limits))
        sink = WatchedSink(AgentSink(client, **parts))
    engine = LLMEngine(
        cast(ModelRunner, watched), source=source, sink=sink, config=config, clock=clock
    )
    try:
        yield LocalEngine(model, engine, watched, source, sink)
    finally:
        engine.close()


@contextmanager
def open_local_store(k: int, m: int) -> Iterator[Path]:
    """The socket of an agent over k + m nodes of this machine, ended at the end."""
    with (
        # A short name: the agent's socket lies in it.
        tempfile.TemporaryDirectory(prefix="ce-", dir="/tmp") as folder,
        LocalCluster.start(
            Path(folder) / "c", nodes=k + m, k=k, m=m, target_size_bytes=1 << 30, agents=1
        ) as cluster,
    ):
        yield cluster.agents.socket("a01")


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """--k and --m, for `open_local_store`."""
    parser.add_argument("--k", type=int, default=10, help="data shards; k + m nodes are started")
    parser.add_argument("--m", type=int, default=2, help="parity shards")
