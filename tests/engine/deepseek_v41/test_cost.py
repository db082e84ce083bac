"""What a token costs does not grow with the context, but for choosing among the entries.

Counted, not timed: the numbers that tensor operations write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.block_pool import BlockPool
from engine.models.deepseek_v41.layout import block_layout
from engine.models.deepseek_v41.model import DeepseekV41
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import StatePool
from kernels.operations import REFERENCE

from .model_bench import ModelBench

GROWS_BY_NATURE = ("score_entries", "select_topk", "select_candidate_blocks")
"""Scores of all entries, and choices from all of them."""


class WrittenNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that operations write, apart from those inside `uncounted`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._depth = 0

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401
        types: object,
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = function(*arguments, **(named or {}))
        if self._depth == 0 and isinstance(result, torch.Tensor):
            is_view = result._is_view() and function.is_view
            self.count += 0 if is_view else result.numel()
        return result

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            with self.uncounted():
                return function(*arguments, **named)

        return inner


@pytest.fixture(scope="module")
def counted() -> tuple[ModelBench, WrittenNumbers]:
    written = WrittenNumbers()
    wrapped = {name: written.wrap(getattr(REFERENCE, name)) for name in GROWS_BY_NATURE}
    config = shipped_config("v41-nano")
    pool = BlockPool(block_bytes=block_layout(config).block_bytes, capacity_blocks=16)
    model = DeepseekV41(
        config,
        random_weights(config, torch.Generator().manual_seed(1)),
        compressed_ids_V=torch.arange(config.vocabulary),
        pool=pool,
        operations=dataclasses.replace(REFERENCE, **wrapped),
    )
    return ModelBench(model, pool, StatePool(config, slots=1)), written


def numbers_written(counted: tuple[ModelBench, WrittenNumbers], context: int, tokens: int) -> int:
    """By a pass of `tokens` after `context` of others."""
    bench, written = counted
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 300, (context + tokens,), generator=generator).tolist()
    state = bench.begin(context + tokens)
    if context:
        bench.run(state, ids[:context])
    written.count = 0
    with written:
        bench.run(state, ids[context:])
    bench.end(state)
    return written.count


def test_prompt_of_twice_the_length_costs_twice_as_much(
    counted: tuple[ModelBench, WrittenNumbers],
) -> None:
    # Both long enough that window, top-k and pool are full for most tokens.
    short, long = (numbers_written(counted, 0, tokens) for tokens in (512, 1024))
    assert 1.9 < long / short < 2.1


def test_step_costs_the_same_behind_any_context(
    counted: tuple[ModelBench, WrittenNumbers],
) -> None:
    near, far = (numbers_written(counted, context, 1) for context in (257, 1025))
    assert 0.99 < far / near < 1.01
