"""A model that answers one prompt at a time: text and numbers around an engine of its own.

For a command line, a demonstration, tests, and programs that ask and wait. Programs with more than
one request at a time use `engine.llm_engine`, or workers.

An LLM belongs to one thread. A store that fails or is slow costs a request its hit and at most a
moment (the deadlines of LLMConfig), never its answer; unless saves that hang hold so many blocks
that the pool cannot take the request, which then raises BlockPoolExhausted.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Self

from kvstore.client import BlockingAgentClient
from kvstore.layout import BLOCK_TOKENS

from .answer_text import AnswerText
from .block_store import BlockStore
from .engine_config import EngineConfig
from .errors import BlockPoolExhausted
from .generation import Generation, Timings
from .llm_engine import LLMEngine
from .load import ComputeType, LoadedRunner, OpenModel, load_runner
from .prefix_source import PrefixSource
from .request import Request, TokenEvent
from .sampling import GREEDY, Sampling
from .save_sink import SaveSink
from .sinks.agent_sink import AgentSink
from .sinks.buffer_sink import BufferSink
from .sinks.threaded_sink import SinkLimits
from .sources.agent_source import AgentSource
from .sources.buffer_source import BufferSource
from .sources.threaded_source import LoadLimits
from .store_faults import StoreFaults

STEP_BUDGET_S = 2.0
"""No answer waits beside the one prompt, so its chunks may be long: some 1,500 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMConfig:
    """Settings that do not change what a model answers."""

    pool_blocks: int = 128
    """Blocks of KV cache in memory; a request needs one for each 128 tokens of prompt + answer."""

    save_queue_blocks: int = 64
    """Blocks that may wait to be saved before the oldest are dropped."""

    fetch_deadline_s: float = 2.0
    """Longest time a request waits for blocks; what came by then is used."""

    room_deadline_s: float = 1.0
    """Longest time a request waits for saves where the pool is short of blocks; after that the
    oldest ones that have not begun are dropped."""

    close_deadline_s: float = 10.0
    """Longest time `close` waits for blocks that are still to be saved."""

    ttl_class: str = "chat"
    """Class of traffic that the store keeps the blocks under."""


class LLM:
    """A model that answers. Close it, or use it as a context manager, so that saves are finished.

    `clock` gives seconds and never goes back. `store_faults.count` is the number of store calls
    that raised an error.
    """

    def __init__(
        self,
        loaded: LoadedRunner,
        *,
        store: BlockStore | BlockingAgentClient | None,
        config: LLMConfig,
        clock: Callable[[], float],
    ) -> None:
        """The store belongs to the caller. That of an agent is used through its arena."""
        self.tokenizer = loaded.tokenizer
        self.namespace = loaded.runner.namespace
        self.compute = loaded.compute
        self.pool = loaded.runner.pool
        self.store_faults = StoreFaults()
        self._config = config
        self._numbers = count()
        self._sink: SaveSink | None = None
        source: PrefixSource | None = None
        if store is not None:
            source, self._sink = _connect(store, loaded, self.store_faults, config, clock)
        self._engine = LLMEngine(
            loaded.runner,
            source=source,
            sink=self._sink,
            config=EngineConfig(
                sequences_max=1,
                queue_requests_max=1,
                step_budget_s=STEP_BUDGET_S,
                room_deadline_s=config.room_deadline_s,
                close_deadline_s=config.close_deadline_s,
            ),
            clock=clock,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def flush(self, deadline_s: float) -> bool:
        """Wait for saves; False if some were still under way after `deadline_s`."""
        return self._sink is None or self._sink.flush(deadline_s)

    def forget_blocks(self) -> None:
        """Let nothing in the pool be found again: the next prompt hits only what the store has."""
        # A block that was handed out anew is no longer what it was kept as.
        self.pool.release(self.pool.allocate(self.pool.free_blocks))

    def close(self) -> bool:
        """End the engine; False if blocks could not be saved within `close_deadline_s`.

        The store stays open: it belongs to the caller. May be called again.
        """
        return self._engine.close()

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Generation:
        """Answer a prompt with at most `max_tokens` tokens; fewer if the context ends before.

        `on_text` gets the text as it comes, in pieces that joined are `text`; if it raises, the
        request ends. Raises InvalidRequest for a prompt that is empty, holds ids the model has
        not, fills the whole context or needs more blocks than the pool has; BlockPoolExhausted if
        saves that hang hold its blocks.
        """
        request = Request(
            request_id=str(next(self._numbers)),
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=self.tokenizer.stop_ids,
            ttl_class=self._config.ttl_class,
        )
        answer = AnswerText(self.tokenizer, on_text)
        token_ids: list[int] = []
        with closing(self._engine.stream(request)) as events:
            for event in events:
                token_ids += event.token_ids
                answer.push(event.token_ids, is_last=event.finish_reason is not None)
        if event.finish_reason == "no_room":
            raise BlockPoolExhausted(
                asked_blocks=-(-len(prompt_ids) // BLOCK_TOKENS),
                free_blocks=self.pool.free_blocks,
                capacity_blocks=self.pool.capacity_blocks,
            )
        return _describe(request, token_ids, answer.text, event)


def load_llm(
    model: str | Path | OpenModel,
    *,
    store: BlockStore | BlockingAgentClient | None,
    clock: Callable[[], float],
    compute: ComputeType | None = None,
    tenant: str = "default",
    config: LLMConfig | None = None,
) -> LLM:
    """A GGUF file or a folder, or one that is open; `compute` None leaves the choice to the CPU.

    Raises MissingModel, ModelFileError with everything that is wrong with the model, or
    InvalidRequest for a `compute` that it cannot run in.
    """
    config = config or LLMConfig()
    loaded = load_runner(
        model, pool_blocks=config.pool_blocks, state_slots=1, compute=compute, tenant=tenant
    )
    return LLM(loaded, store=store, config=config, clock=clock)


def _connect(
    store: BlockStore | BlockingAgentClient,
    loaded: LoadedRunner,
    faults: StoreFaults,
    config: LLMConfig,
    clock: Callable[[], float],
) -> tuple[PrefixSource, SaveSink]:
    """Where prefixes come from and blocks go to."""
    runner = loaded.runner
    namespace, pool, window_layout = runner.namespace, runner.pool, runner.window_layout
    load_limits = LoadLimits(fetch_deadline_s=config.fetch_deadline_s)
    sink_limits = SinkLimits(queue_blocks=config.save_queue_blocks)
    if isinstance(store, BlockingAgentClient):
        return (
            AgentSource(
                store,
                namespace=namespace,
                pool=pool,
                window_layout=window_layout,
                faults=faults,
                limits=load_limits,
                clock=clock,
            ),
            AgentSink(
                store,
                namespace=namespace,
                pool=pool,
                window_layout=window_layout,
                faults=faults,
                limits=sink_limits,
                clock=clock,
            ),
        )
    return (
        BufferSource(
            store,
            namespace=namespace,
            pool=pool,
            has_window_state=window_layout is not None,
            faults=faults,
            limits=load_limits,
            clock=clock,
        ),
        BufferSink(
            store, namespace=namespace, pool=pool, faults=faults, limits=sink_limits, clock=clock
        ),
    )


def _describe(request: Request, token_ids: list[int], text: str, last: TokenEvent) -> Generation:
    report = last.report
    assert last.finish_reason is not None, "a stream ends with its last event"
    assert report is not None, "the last event has the report"
    return Generation(
        prompt_ids=list(request.prompt_ids),
        token_ids=token_ids,
        text=text,
        finish_reason=last.finish_reason,
        timings=Timings(**{field.name: getattr(report, field.name) for field in fields(Timings)}),
        matched_tokens=report.matched_tokens,
        hit_tokens=report.hit_tokens,
        replay_tokens=report.replay_tokens,
        rejected_shards=report.rejected_shards,
        receipt=report.receipt,
    )
