"""Every product with weights is computed in tiles of one height, however many rows a pass has.

With `MKL_CBWR`, which the tests set, some processors give a row equal bits in products of any
height. Comparisons of bits then pass without tiles too; this looks at the products themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.models.deepseek_v41.draft import Drafter
from engine.models.deepseek_v41.model import DeepseekV41
from kernels.operations import REFERENCE
from kernels.reference.tiles import TILE_ROWS

from .model_bench import ModelBench, nano_bench

ELEMENTWISE_BY_DESIGN = ("score_entries", "score_candidates", "sparse_attention")
"""Scores are exact in any shape, and attention has products of a query's own: not tiled."""

# In inference mode `matmul` and its like come as they were called, not as the products inside.
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"}) | frozenset(
    {"matmul", "linear", "einsum"}
)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The shapes of matrix products while it is on; `hidden` parts are not looked at."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
        self._hidden = 0

    @contextmanager
    def hidden(self) -> Iterator[None]:
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        name = func.name().removeprefix("aten::").split(".")[0]
        if not self._hidden and name in PRODUCTS:
            shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
            self.shapes.add((name, shapes[-2], shapes[-1]))
        return func(*args, **(kwargs or {}))


def watched_bench(products: Products) -> ModelBench:
    """Nano, with the operations that need no tiles hidden from `products`."""

    def hide(name: str) -> Any:  # noqa: ANN401
        function = getattr(REFERENCE, name)

        def hidden(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with products.hidden():
                return function(*args, **kwargs)

        return hidden

    bench = nano_bench()
    operations = replace(REFERENCE, **{name: hide(name) for name in ELEMENTWISE_BY_DESIGN})
    model = DeepseekV41(
        bench.model.config,
        bench.model.weights,
        compressed_ids_V=torch.arange(bench.model.config.vocabulary),
        pool=bench.blocks,
        operations=operations,
    )
    return ModelBench(model, bench.blocks, bench.states)


@pytest.mark.parametrize("cuts", [(), (1,), (7, 9, 1)])
def test_products_have_the_height_of_a_tile_in_any_pass(cuts: tuple[int, ...]) -> None:
    products = Products()
    bench = watched_bench(products)
    state = bench.begin(30)
    with products:
        bench.run(state, list(range(3, 23)), cuts)
    assert len(products.shapes) >= 8, "most products were not seen"
    assert {name for name, _, _ in products.shapes} == {"mm", "matmul"}
    heights = {left[0] for _, left, _ in products.shapes}
    assert heights == {TILE_ROWS}, sorted(products.shapes)


def test_products_of_a_draft_have_the_height_of_a_tile_too() -> None:
    products = Products()
    bench = watched_bench(products)
    state = bench.begin(30)
    bench.run(state, list(range(3, 13)))
    with products:
        Drafter(bench.model).draft(state, 5)
    tiled = {shape for shape in products.shapes if shape[0] in {"mm", "matmul"}}
    assert {left[0] for _, left, _ in tiled} == {TILE_ROWS}
    # One guess after the other: the Markov and the confidence head are vectors by nature.
    assert {name for name, _, _ in products.shapes - tiled} == {"mv"}
