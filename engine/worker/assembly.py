"""The parts of a worker's engine, put together: model, agent, source, sink, hand-overs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from kvstore.client import AgentClient, BlockingAgentClient

from ..engine_config import EngineConfig
from ..kv.open_mover import OpenedMover, open_mover
from ..llm_engine import LLMEngine
from ..load import PoolMemory, load_runner
from ..model_runner import ModelRunner
from ..scheduler.cost import DEFAULT_COST
from ..sinks.agent_sink import AgentSink
from ..sources.agent_source import AgentSource
from ..store_faults import StoreFaults
from .hand_overs import HandOvers
from .options import Role, WorkerOptions

log = logging.getLogger(__name__)

POOL_BLOCKS = 256
HAND_OVER_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """An engine, and what moves its sequences and its blocks: None without an agent."""

    engine: LLMEngine
    hand_overs: HandOvers | None
    faults: StoreFaults
    mover: OpenedMover | None = None


@contextmanager
def open_engine(options: WorkerOptions, *, clock: Callable[[], float]) -> Iterator[WorkerEngine]:
    """Loads the model and connects to the agent. At the end, waits for what is still to be saved.

    Raises EngineError, StoreError, OSError.
    """
    config = choose_config(options)
    loaded = load_runner(
        options.model,
        pool_blocks=choose_pool(options),
        state_slots=options.sequences,
        device=options.device,
    )
    with ExitStack() as stack:
        if options.agent is None:
            engine = stack.enter_context(LLMEngine(loaded.runner, config=config, clock=clock))
            yield WorkerEngine(engine, None, StoreFaults())
        else:
            agent = stack.enter_context(AgentClient.open(options.agent, name=options.name))
            if not agent.is_connected:
                log.warning("no agent answers at %s: all is computed until one does", options.agent)
            yield _open_with_agent(stack, options, config, loaded.runner, agent, clock)


def _open_with_agent(
    stack: ExitStack,
    options: WorkerOptions,
    config: EngineConfig,
    runner: ModelRunner,
    agent: BlockingAgentClient,
    clock: Callable[[], float],
) -> WorkerEngine:
    faults = StoreFaults()
    opened = stack.enter_context(
        open_mover(
            runner.pool,
            runner.namespace.layout,
            lambda: agent.arena,
            clock=clock,
            must_pin=options.must_pin,
        )
    )
    source = AgentSource(
        agent,
        namespace=runner.namespace,
        pool=runner.pool,
        window_layout=runner.window_layout,
        faults=faults,
        clock=clock,
        mover=opened.mover,
    )
    sink = AgentSink(
        agent,
        namespace=runner.namespace,
        pool=runner.pool,
        window_layout=runner.window_layout,
        faults=faults,
        clock=clock,
        mover=opened.mover,
    )
    engine = LLMEngine(runner, source=source, sink=sink, config=config, clock=clock)
    stack.enter_context(engine)
    hand_overs = HandOvers(
        engine,
        agent,
        faults=faults,
        on_change=engine.wake,
        mover=opened.mover,
        ticket_key=options.ticket_key,
    )
    stack.callback(hand_overs.close, HAND_OVER_CLOSE_S)
    if options.role is Role.PREFILL:
        engine.on_last_chunk = hand_overs.begin
    return WorkerEngine(engine, hand_overs, faults, opened)


def choose_pool(options: WorkerOptions) -> int | PoolMemory:
    """How large the pool of blocks is to be."""
    if options.pool_bytes is not None:
        return PoolMemory(options.pool_bytes)
    return options.pool_blocks or POOL_BLOCKS


def choose_config(options: WorkerOptions) -> EngineConfig:
    """The bounds of the engine."""
    config = EngineConfig(
        sequences_max=options.sequences,
        queue_requests_max=options.queue,
        cost=DEFAULT_COST if options.cost is None else options.cost.cost,
    )
    if options.step_budget_s is None:
        return config
    return replace(config, step_budget_s=options.step_budget_s)
