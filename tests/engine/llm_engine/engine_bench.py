"""An engine over a runner of either family, with a source and a sink that a test drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Run
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from engine.block_pool import BlockPool
from engine.engine_config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.load import load_runner
from engine.model_runner import ModelRunner
from engine.models.deepseek_v41.layout import block_layout
from engine.models.deepseek_v41.state import StatePool
from engine.request import Request, TokenEvent
from engine.request_report import RequestReport
from engine.runners.llama_runner import LlamaRunner
from engine.runners.v41_runner import V41Runner
from engine.sampling import Sampling
from engine.scheduler.cost import PrefillCost
from kvstore.key import Namespace
from tests.engine.llm_engine.driven import DrivenSink, DrivenSource, Kept
from tests.engine.llm_engine.summing_runner import SummingRunner
from tests.engine.runners.runner_bench import nano_config, nano_model
from tests.engine.tiny_model import TinyModel

FILL = 0xFE
"""NaN in every format of the caches: what is read of it shows."""

WARM = Sampling(temperature=1.0, seed=11)
COST = PrefillCost(a0_s=0.0, a1_s=0.001, a2_s=0.0, a3_s=0.0)
"""A millisecond a token, so that a budget in milliseconds is one in tokens."""


@cache
def tiny_runner() -> LlamaRunner:
    """The smallest llama, whose model every runner of `llama` shares."""
    path = Path(mkdtemp()) / "tiny.gguf"
    TinyModel(layers=2, hidden=16, heads=2, kv_heads=1, intermediate=16).write(path)
    runner = load_runner(path, pool_blocks=1, state_slots=1, compute="float32").runner
    path.unlink()
    path.parent.rmdir()
    assert isinstance(runner, LlamaRunner)
    return runner


def llama(pool_blocks: int, state_slots: int) -> ModelRunner:
    """A runner of the smallest llama with a pool of its own."""
    runner = tiny_runner()
    pool = BlockPool(block_bytes=runner.pool.block_bytes, capacity_blocks=pool_blocks)
    return LlamaRunner(runner._model, pool, runner.namespace)


def nano(pool_blocks: int, state_slots: int) -> ModelRunner:
    """A runner of v41-nano with random weights, with pools of its own."""
    config = nano_config()
    layout = block_layout(config)
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=pool_blocks)
    states = StatePool(config, state_slots)
    states.memory.fill_(FILL)
    namespace = Namespace(model="nano", weights="random", tokenizer="none", layout=layout)
    return V41Runner(nano_model().build(pool), pool=pool, states=states, namespace=namespace)


def summing(pool_blocks: int, state_slots: int) -> ModelRunner:
    """A runner with window state that costs next to nothing."""
    return SummingRunner(pool_blocks, state_slots)


def dense_summing(pool_blocks: int, state_slots: int) -> ModelRunner:
    """One without window state."""
    return SummingRunner(pool_blocks, state_slots, is_dense=True)


MakeRunner = Callable[[int, int], ModelRunner]


@dataclass(eq=False)
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(eq=False)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    replays: list[int | None] = field(default_factory=list)
    """For each token that came, where the replay began that it hangs on."""
    finish_reason: str | None = None
    report: RequestReport | None = None
    is_prefilled: bool = False

    def add(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, "an event after the last one"
        assert event.position == len(self.token_ids), (event, self.token_ids)
        self.token_ids += event.token_ids
        self.replays += [event.replay_first] * len(event.token_ids)
        self.finish_reason = event.finish_reason
        self.is_prefilled = event.is_prefilled
        self.report = event.report
        assert (event.report is None) == (event.finish_reason is None and not event.is_prefilled)


class EngineBench:
    """`answers` holds what came for each request."""

    def __init__(
        self,
        make_runner: MakeRunner = llama,
        *,
        pool_blocks: int = 32,
        state_slots: int = 8,
        kept: Kept | None = None,
        has_source: bool = True,
        **settings: object,
    ) -> None:
        self.runner = make_runner(pool_blocks, state_slots)
        self.runner.pool.memory.fill_(FILL)
        self.kept = Kept() if kept is None else kept
        self.clock = Clock()
        self.sink = DrivenSink(self.runner, self.kept)
        self.source = DrivenSource(self.runner, self.kept)
        defaults: dict[str, object] = {"cost": COST, "step_budget_s": 0.256}
        self.engine = LLMEngine(
            self.runner,
            source=self.source if has_source else None,
            sink=self.sink,
            config=EngineConfig(**(defaults | settings)),  # type: ignore[arg-type]
            clock=self.clock,
        )
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.order: list[str] = []
        """Requests in the order of their first tokens."""

    def add(self, request: Request) -> None:
        self.engine.add_request(request)
        self.expect(request)

    def expect(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.answers[request.request_id] = Answer(list(request.answered_ids))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for event in self.engine.step():
                answer = self.answers[event.request_id]
                if event.request_id not in self.order and event.token_ids:
                    self.order.append(event.request_id)
                answer.add(event)

    def step_until(self, condition: Callable[[], bool], *, steps_max: int = 5000) -> int:
        """Steps taken until the condition holds."""
        for steps in range(steps_max):
            if condition():
                return steps
            self.step()
        raise AssertionError(f"not so after {steps_max} steps: {self.engine.status}")

    def finish(self) -> None:
        """Step until every request has ended."""
        self.step_until(lambda: not self.engine.has_requests)

    def tokens(self, request_id: str) -> list[int]:
        return self.answers[request_id].token_ids

    def report(self, request_id: str) -> RequestReport:
        report = self.answers[request_id].report
        assert report is not None
        return report

    def assert_all_is_free(self) -> None:
        pool = self.runner.pool
        assert pool.free_blocks == pool.capacity_blocks
        assert references_of(pool) == {}
        status = self.engine.status
        assert (status.waiting, status.entering, status.prefilling) == (0, 0, 0)
        assert (status.decoding, status.held) == (0, 0)


def references_of(pool: BlockPool) -> dict[int, int]:
    """References to each block that is in use."""
    return {block: count for block, count in enumerate(pool._references) if count}


@contextmanager
def bench(make_runner: MakeRunner = llama, **settings: object) -> Iterator[EngineBench]:
    """A bench whose engine has everything back at the end."""
    made = EngineBench(make_runner, **settings)  # type: ignore[arg-type]
    yield made
    made.engine.close()
    made.assert_all_is_free()


def prompt_of(tokens: int, seed: int = 0, *, vocabulary: int = 256) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + 7)
    return torch.randint(3, vocabulary, (tokens,), generator=generator).tolist()


def request_of(
    name: str,
    prompt_ids: Run[int],
    max_tokens: int = 4,
    *,
    sampling: Sampling = WARM,
    stop_ids: frozenset[int] = frozenset(),
    **more: object,
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=list(prompt_ids),
        max_tokens=max_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        **more,  # type: ignore[arg-type]
    )


def answer_alone(make_runner: MakeRunner, request: Request) -> list[int]:
    """The tokens of a request that has an engine to itself, without a store."""
    return list(
        _answer_alone(make_runner, tuple(request.prompt_ids), request.max_tokens, request.sampling)
    )


@cache
def _answer_alone(
    make_runner: MakeRunner, prompt_ids: tuple[int, ...], max_tokens: int, sampling: Sampling
) -> list[int]:
    alone = EngineBench(make_runner, pool_blocks=64, state_slots=1, has_source=False)
    alone.add(request_of("alone", prompt_ids, max_tokens, sampling=sampling))
    alone.finish()
    alone.engine.close()
    return alone.tokens("alone")
