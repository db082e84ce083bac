"""Parity and lost shards on a GPU: the bytes that `erasure` makes."""

from collections.abc import Sequence
from itertools import chain, combinations
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from erasure.code import Code
from erasure.matrix import multiplication_table as erasure_table
from kernels.gpu import gf256 as gpu
from kernels.gpu.compiler import lower_to_cuda
from kernels.reference.gf256 import (
    combine_shards,
    multiplication_table,
    pack_recipe,
    recipe_bytes,
)
from tests.kernels.gpu.cuda_on_cpu import ARCHITECTURES, run_on_cpu

LOSSES: dict[str, list[tuple[int, ...]]] = {
    "encode": [(10, 11)],
    "single": [(shard,) for shard in range(12)],
    "double": list(combinations(range(12), 2)),
}
ALL_LOSSES = list(chain(*LOSSES.values()))


class Case(NamedTuple):
    """Blocks that have each lost something, and what they were."""

    pool: torch.Tensor
    parity: torch.Tensor
    block_ids: torch.Tensor
    recipes: torch.Tensor
    whole_pool: torch.Tensor
    whole_parity: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self[:4]

    def check(self, pool: torch.Tensor, parity: torch.Tensor) -> None:
        assert torch.equal(pool, self.whole_pool)
        assert torch.equal(parity, self.whole_parity)


def make_case(
    losses: Sequence[tuple[int, ...]], rng: Random, k: int = 10, m: int = 2, shard_bytes: int = 64
) -> Case:
    """A pool with a block for each of `losses` in random rows, and other blocks between them."""
    code, n = Code(k, m), len(losses)
    rows = 2 * n + 1
    data = np.frombuffer(rng.randbytes(rows * k * shard_bytes), np.uint8).reshape(rows, -1)
    ids = rng.sample(range(rows), n)
    parity = np.zeros((n, m * shard_bytes), np.uint8)
    code.encode([data[row] for row in ids], list(parity), shard_bytes=shard_bytes)
    whole_pool = torch.from_numpy(data.copy())
    whole_parity = torch.from_numpy(parity).view(n, m, shard_bytes)
    pool, beside, recipes = whole_pool.clone(), whole_parity.clone(), []
    for block, lost in enumerate(losses):
        sources = [shard for shard in range(k + m) if shard not in lost]
        rng.shuffle(sources)
        sources = sources[:k]
        recipes.append(pack_recipe(k, m, sources, lost, code.coefficients(lost, sources).tolist()))
        for shard in lost:
            if shard < k:
                pool[ids[block]].view(k, shard_bytes)[shard] = 0xEE
            else:
                beside[block, shard - k] = 0xEE
    return Case(
        pool,
        beside,
        torch.tensor(ids, dtype=torch.int32),
        torch.frombuffer(bytearray(b"".join(recipes)), dtype=torch.uint8).view(n, -1),
        whole_pool,
        whole_parity,
    )


def test_table_has_the_products_of_erasure() -> None:
    table = multiplication_table(torch.device("cpu"))
    assert np.array_equal(table.numpy(), erasure_table())


@pytest.mark.parametrize("kind", LOSSES)
def test_reference_makes_what_erasure_makes_for_all_losses(kind: str, rng: Random) -> None:
    case = make_case(LOSSES[kind], rng)
    combine_shards(*case.arguments)
    case.check(case.pool, case.parity)


@pytest.mark.parametrize(("k", "m", "shard_bytes"), [(10, 2, 11_392), (4, 1, 16), (20, 12, 64)])
def test_reference_makes_what_erasure_makes_under_other_codes(
    k: int, m: int, shard_bytes: int, rng: Random
) -> None:
    losses = [tuple(rng.sample(range(k + m), min(m, 1 + at))) for at in range(5)]
    case = make_case(losses, rng, k, m, shard_bytes)
    combine_shards(*case.arguments)
    case.check(case.pool, case.parity)


@pytest.mark.parametrize(
    ("losses", "k", "m", "shard_bytes"),
    [
        (ALL_LOSSES, 10, 2, 64),
        ([(0, 9), (3,)], 10, 2, 11_392),
        ([(0,), (4,)], 4, 1, 16),
        ([(1, 2, 30), (19,)], 20, 12, 64),
    ],
    ids=["all losses of 10+2", "shards of v4.1", "4+1", "20+12"],
)
def test_lowered_source_makes_what_erasure_makes_when_it_runs_on_the_cpu(
    losses: list[tuple[int, ...]], k: int, m: int, shard_bytes: int, rng: Random
) -> None:
    case = make_case(losses, rng, k, m, shard_bytes)
    vectors = shard_bytes // gpu.VECTOR_BYTES
    run_on_cpu(
        gpu.combine_program(k, m, shard_bytes),
        (len(losses), -(-vectors // gpu.THREADS)),
        pool=case.pool,
        parity=case.parity,
        block_ids=case.block_ids,
        recipes=case.recipes,
        blocks=len(losses),
        pool_blocks=len(case.pool),
    )
    case.check(case.pool, case.parity)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernel_is_lowered_with_accesses_of_16_bytes(arch: str) -> None:
    source = lower_to_cuda(gpu.combine_program(10, 2, 11_392), arch)
    assert source.count("*(int4*)(given + (source * 4)) = *(int4*)(p") == 2
    assert source.count("= *(int4*)(made + 0)") == 2


def test_a_recipe_that_makes_no_sense_is_refused() -> None:
    row = [1, 2, 3]
    assert len(pack_recipe(3, 2, [0, 1, 4], [2], [row])) == recipe_bytes(3, 2) == 12
    for sources, targets, rows in (
        ([0, 1], [2], [row]),
        ([0, 1, 2], [2], [row]),
        ([0, 1, 5], [2], [row]),
        ([0, 1, 3], [2], [[1, 2]]),
        ([0, 1, 3], [2, 4], [row]),
    ):
        with pytest.raises(ValueError, match="expected 3 sources of 5 shards"):
            pack_recipe(3, 2, sources, targets, rows)


def test_arguments_that_do_not_fit_are_refused(rng: Random) -> None:
    case = make_case([(0, 1), (2,)], rng)
    pool, parity, ids, recipes = case.arguments
    for operation in (combine_shards, gpu.combine_shards):
        for wrong in (
            (pool[:, :-16].contiguous(), parity, ids, recipes),
            (pool, parity[..., :8].contiguous(), ids, recipes),
            (pool, parity, ids[:1], recipes),
            (pool, parity, ids, recipes[:, :-4].contiguous()),
            (pool[:, ::2], parity[..., ::2], ids, recipes),
        ):
            with pytest.raises(ValueError, match="expected"):
                operation(*wrong)
        for wrong in ((pool.int(), parity, ids, recipes), (pool, parity, ids.long(), recipes)):
            with pytest.raises(TypeError, match="expected"):
                operation(*wrong)


def test_memory_that_begins_between_words_is_refused_by_the_kernel(rng: Random) -> None:
    case = make_case([(0, 1)], rng)
    room = torch.zeros(case.pool.numel() + 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="pool: given an address that is 1 modulo 16"):
        gpu.combine_shards(room[1:].view(case.pool.shape), *case.arguments[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("shard_bytes", [64, 11_392])
def test_kernel_makes_what_erasure_makes_for_all_losses(shard_bytes: int, rng: Random) -> None:
    case = make_case(ALL_LOSSES, rng, shard_bytes=shard_bytes)
    pool, parity, ids, recipes = (tensor.cuda() for tensor in case.arguments)
    gpu.combine_shards(pool, parity, ids, recipes)
    case.check(pool.cpu(), parity.cpu())
