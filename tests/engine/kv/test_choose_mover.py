"""The choice between movers, and the measurement that it is made from."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest

from engine.errors import TransferFailed
from engine.kv.choose_mover import MoverRate, choose_mover, measure_movers
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import ComputeMark, Transfer
from engine.kv.open_mover import open_mover
from tests.engine.kv.delayed_mover import DelayedMover
from tests.engine.stored_prompt import LAYOUT, StoredPrompt


def rate(name: str, into: float, out: float) -> MoverRate:
    return MoverRate(name=name, in_bytes_per_s=into, out_bytes_per_s=out, issue_us=1.0)


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ([rate("a", 50, 40)], "a"),
        ([rate("a", 40, 90), rate("b", 50, 10)], "b"),
        ([rate("a", 49, 30), rate("b", 50, 45)], "b"),
        ([rate("a", 49, 45), rate("b", 50, 44)], "a"),
        ([rate("a", 50, 45), rate("b", 50, 45)], "a"),
    ],
)
def test_choice_is_the_fastest_in_and_among_equals_the_fastest_out(
    rates: list[MoverRate], chosen: str
) -> None:
    assert choose_mover(rates) == chosen


class FailingMover(MemcpyMover):
    """A device that takes no work."""

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        raise TransferFailed("it has failed")


def test_measurement_tells_what_movers_do_and_gives_the_blocks_back() -> None:
    pool = StoredPrompt(1).pool(10)
    delayed = DelayedMover(pool, LAYOUT)
    delayed.go_on()
    movers = {
        "memcpy": MemcpyMover(pool, LAYOUT),
        "failing": FailingMover(pool, LAYOUT),
        "delayed": delayed,
    }
    arena = np.zeros(8 * LAYOUT.block_bytes, np.uint8).data
    widths = [section.bytes for section in LAYOUT.sections]
    rates, problems = measure_movers(movers, pool, widths, arena, clock=time.monotonic, budget_s=0)
    assert [one.name for one in rates] == ["memcpy", "delayed"]
    assert all(one.in_bytes_per_s > 0 and one.out_bytes_per_s > 0 for one in rates)
    assert problems == {"failing": "it has failed"}
    assert pool.free_blocks == 10


def test_pool_of_the_host_is_filled_by_a_memcpy() -> None:
    pool = StoredPrompt(1).pool(1)
    with open_mover(pool, LAYOUT, lambda: None, clock=time.monotonic) as opened:
        assert opened.describe() == {"mover": "memcpy", "rates": [], "problems": {}}


@pytest.mark.gpu
def test_pool_on_a_gpu_gets_a_mover_that_was_measured() -> None:
    from engine.block_pool import BlockPool

    pool = BlockPool(block_bytes=LAYOUT.block_bytes, capacity_blocks=80, device="cuda")
    arena = np.zeros((1 << 20) + 4096, np.uint8)
    first = -arena.ctypes.data % 4096
    view = arena[first : first + (1 << 20)].data
    with open_mover(pool, LAYOUT, lambda: view, clock=time.monotonic) as opened:
        described = opened.describe()
        assert described["pinned_bytes"] == 1 << 20
        assert described["mover"] in {one["name"] for one in described["rates"]}
        ids = pool.allocate(4)
        part = view[: 4 * LAYOUT.sections[0].bytes]
        part[:] = bytes([7]) * len(part)
        opened.mover.to_pool(part, 0, ids).wait()
        assert (pool.memory[ids, : LAYOUT.sections[0].bytes] == 7).all()
