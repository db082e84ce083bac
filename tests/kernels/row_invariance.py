"""That the bits of a row do not depend on the rows beside it, nor on the number of threads.

The latter where the processor lets it be so: `threads_keep_bits`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch.overrides import TorchFunctionMode

from kernels.reference.tiles import TILE_ROWS, RowTiles, plan_tiles

Outputs = torch.Tensor | tuple[torch.Tensor, ...]


def check_row_invariance(compute: Callable[[torch.Tensor], Outputs], rows: int) -> None:
    """`compute` gives the outputs of some rows (int64 indices); row by row they are always equal.

    All at once, each alone, in chunks of several sizes, in another order with rows that are there
    twice; with one thread and with two.
    """
    everything = torch.arange(rows)
    with _threads(1):
        expected = _bits(compute(everything))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    twice = torch.cat([order, order[: rows // 2 + 1]])
    for threads in (1, 2):
        with _threads(threads):
            if not threads_keep_bits():
                expected = _bits(compute(everything))
            for size in (1, 2, 3, 7, TILE_ROWS, TILE_ROWS + 1, rows):
                chunks = [_bits(compute(some)) for some in torch.split(everything, size)]
                for number, whole in enumerate(expected):
                    joined = torch.cat([chunk[number] for chunk in chunks])
                    assert torch.equal(joined, whole), f"chunks of {size}, {threads} threads"
            for whole, mixed in zip(expected, _bits(compute(twice)), strict=True):
                assert torch.equal(mixed, whole[twice]), f"mixed rows, {threads} threads"


class RecordedProducts(TorchFunctionMode):
    """Keeps the left-hand side of each matrix product."""

    PRODUCTS = ("mm", "bmm", "matmul", "__matmul__", "linear")

    def __init__(self) -> None:
        super().__init__()
        self.left: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[torch.Tensor, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func.__name__ in self.PRODUCTS:
            self.left.append(args[0].clone())
        return func(*args, **(kwargs or {}))


def check_products_of_tiles(compute: Callable[[], object], x_TK: torch.Tensor, first: int) -> None:
    """Each product has the rows of one tile; row t of x, at position `first` + t, is at its place.

    With `MKL_CBWR` products happen to have these bits in any shape, so bits do not show this.
    """
    with RecordedProducts() as products:
        compute()
    assert {len(left) for left in products.left} == {TILE_ROWS}
    taken = [left for left in products.left if left.shape[1] == x_TK.shape[1]]
    for row, x_K in enumerate(x_TK):
        places = [(left == x_K).all(-1).nonzero().flatten().tolist() for left in taken]
        found = {place for listed in places for place in listed}
        assert found == {(first + row) % TILE_ROWS}, row


@cache
def threads_keep_bits() -> bool:
    """Small float32 products have the same bits with one thread and with two.

    `MKL_CBWR` sees to that on Intel's processors; on an AMD EPYC, those of 4 to 17 columns differ.
    """
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((3, 32, 5), (4, 16, 17), (8, 64, 16), (8, 128, 8)):
        a = torch.randn(rows, inner, generator=generator)
        b = torch.randn(columns, inner, generator=generator).T
        found = []
        for threads in (1, 2):
            with _threads(threads):
                found.append(a @ b)
        if not torch.equal(*found):
            return False
    return True


def tiles_of(rows: torch.Tensor, first: int = 3) -> RowTiles:
    """Tiles of rows of one sequence, of which row 0 is at position `first`."""
    return plan_tiles(rows + first)


def _bits(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """Bytes, so that 0 and -0 differ and NaN equals itself; outputs have two dimensions or more."""
    tensors = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return tuple(x.contiguous().view(torch.uint8) for x in tensors)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0, spread: float = 1) -> torch.Tensor:
    """float32 numbers, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
