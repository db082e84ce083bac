"""The choice between movers, and the measurement that it is made from."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch

from engine.block_pool import BlockPool
from engine.errors import MoverUnavailable, describe_in_one_line
from engine.kv import open_mover as open_mover_module
from engine.kv import pinned as pinned_module
from engine.kv.choose_mover import MoverRate, choose_mover, make_fastest, measure_movers
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import ComputeMark, EndedTransfer, SectionMover, Transfer
from engine.kv.nixl_mover import BOUNCE_BYTES, NixlMover
from engine.kv.open_mover import open_mover
from engine.kv.pinned import PinnedMemory
from engine.kv.section_kernels import TorchKernels
from tests.engine.kv.delayed_mover import DelayedMover
from tests.engine.kv.failing_mover import FailingMover
from tests.engine.kv.fake_nixl import FakeNixl
from tests.engine.stored_prompt import LAYOUT, StoredPrompt


def rate(name: str, into: float, out: float, issue_us: float = 1.0) -> MoverRate:
    return MoverRate(name=name, in_bytes_per_s=into, out_bytes_per_s=out, issue_us=issue_us)


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


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ([rate("busy", 50, 50, 350), rate("calm", 40, 40, 70)], "calm"),
        ([rate("busy", 50, 50, 135), rate("calm", 45, 45, 65)], "calm"),
        ([rate("usual", 50, 50, 90), rate("calm", 45, 45, 10)], "usual"),
        # On a slow host all of them take long; some still take longer than others.
        (
            [rate("busy", 50, 50, 900), rate("usual", 49, 45, 250), rate("calm", 40, 40, 130)],
            "usual",
        ),
        # What moves little takes little, and is no measure for the others.
        ([rate("usual", 50, 50, 150), rate("slow", 9, 9, 5)], "usual"),
        ([rate("only", 50, 50, 5_000)], "only"),
    ],
)
def test_way_that_takes_the_hosts_time_is_left_out_while_there_is_another(
    rates: list[MoverRate], chosen: str
) -> None:
    assert choose_mover(rates) == chosen


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


class Lasting(EndedTransfer):
    """Has ended when it is first looked at, which is so long after it was started."""

    def __init__(self, moves_s: float, now_s: list[float]) -> None:
        self._moves_s, self._now_s = moves_s, now_s

    @property
    def has_ended(self) -> bool:  # type: ignore[override]
        self._now_s[0] += self._moves_s
        self._moves_s = 0.0
        return True


class Closing(MemcpyMover):
    """Takes so long to start by a clock of the test, and `moves_s` more until it has moved, and
    says when it was closed."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        name: str,
        takes_s: float,
        now_s: list[float],
        moves_s: float = 0.0,
    ) -> None:
        super().__init__(pool, LAYOUT)
        self.name = name
        self._takes_s, self._moves_s, self._now_s = takes_s, moves_s, now_s

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        self._now_s[0] += self._takes_s
        super().to_pool(part, section, block_ids)
        return Lasting(self._moves_s, self._now_s)

    def from_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        self._now_s[0] += self._takes_s
        super().from_pool(part, section, block_ids)
        return Lasting(self._moves_s, self._now_s)

    def close(self) -> None:
        CLOSED.append(self.name)


CLOSED: list[str] = []


def make_none() -> MemcpyMover:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 MiB.\nSee the docs")


def make_without_compiler() -> MemcpyMover:
    raise FileNotFoundError(2, "No such file or directory", "nvcc")


def make_unavailable() -> MemcpyMover:
    raise MoverUnavailable("batched", ["CUDA 12"])


@pytest.fixture
def arena() -> memoryview:
    return np.zeros(8 * LAYOUT.block_bytes, np.uint8).data


WIDTHS = [section.bytes for section in LAYOUT.sections]


def test_only_the_fastest_mover_is_kept_and_those_that_cannot_be_made_cost_no_other(
    arena: memoryview,
) -> None:
    pool, now_s = StoredPrompt(1).pool(10), [0.0]
    made: list[weakref.ref[object]] = []

    def make(name: str, takes_s: float) -> Closing:
        mover = Closing(pool, name=name, takes_s=takes_s, now_s=now_s)
        made.append(weakref.ref(mover))
        return mover

    makers: dict[str, Callable[[], SectionMover]] = {
        "full": make_none,
        "old": make_unavailable,
        "uncompiled": make_without_compiler,
        "slow": partial(make, "slow", 1.0),
        "fast": partial(make, "fast", 0.001),
    }
    CLOSED.clear()
    chosen = make_fastest(makers, pool, WIDTHS, arena, clock=lambda: now_s[0])
    assert chosen.mover.name == "fast"
    assert CLOSED == ["slow"]
    assert chosen.problems == {
        "full": "CUDA out of memory. Tried to allocate 16 MiB.",
        "old": "mover batched: CUDA 12",
        "uncompiled": "[Errno 2] No such file or directory: 'nvcc'",
    }
    gc.collect()
    assert [ref() is None for ref in made] == [True, False], "staging of the slow one is free"
    assert pool.free_blocks == 10


def test_way_that_was_left_out_for_the_hosts_time_is_named(arena: memoryview) -> None:
    """It may be the one with the highest rate."""
    pool, now_s = StoredPrompt(1).pool(10), [0.0]
    make = partial(Closing, pool, now_s=now_s)
    makers: dict[str, Callable[[], SectionMover]] = {
        "busy": partial(make, name="busy", takes_s=0.00035),
        "calm": partial(make, name="calm", takes_s=0.00007, moves_s=0.0004),
    }
    chosen = make_fastest(makers, pool, WIDTHS, arena, clock=lambda: now_s[0])
    assert chosen.mover.name == "calm"
    assert chosen.problems == {"busy": "takes the host 350 us a section"}
    rates = {one.name: one.in_bytes_per_s for one in chosen.rates}
    assert rates["busy"] > rates["calm"]


def test_device_that_takes_no_mover_is_told_in_one_line(arena: memoryview) -> None:
    pool = StoredPrompt(1).pool(10)
    makers: dict[str, Callable[[], SectionMover]] = {
        "full": make_none,
        "failing": lambda: FailingMover(pool, LAYOUT),
    }
    with pytest.raises(MoverUnavailable) as raised:
        make_fastest(makers, pool, WIDTHS, arena, clock=time.monotonic)
    assert describe_in_one_line(raised.value) == (
        "mover for a GPU: full: CUDA out of memory. Tried to allocate 16 MiB.; "
        "failing: it has failed"
    )
    assert pool.free_blocks == 10


def test_pool_of_the_host_is_filled_by_a_memcpy() -> None:
    pool = StoredPrompt(1).pool(1)
    with open_mover(pool, LAYOUT, lambda: None, clock=time.monotonic) as opened:
        assert opened.describe() == {"mover": "memcpy", "rates": [], "problems": {}}


def test_ways_are_measured_with_an_arena_as_the_real_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where that cannot be page-locked, what is measured with is not; NIXL has both registered."""
    pool, api = StoredPrompt(1).pool(10), FakeNixl()
    arena = np.zeros(8 * LAYOUT.block_bytes, np.uint8).data

    def list_nixl(*_: object, lent: memoryview, **__: object) -> tuple[dict[str, object], object]:
        make = partial(
            NixlMover,
            pool,
            LAYOUT,
            arena=lambda: arena,
            clock=time.monotonic,
            lent=lent,
            api=api.module,
        )
        return {"nixl": make}, {}

    monkeypatch.setattr(open_mover_module, "find_kernels", lambda *_: TorchKernels())
    monkeypatch.setattr(open_mover_module, "find_gdr_lacks", lambda *_: [])
    monkeypatch.setattr(open_mover_module, "list_makers", list_nixl)
    pinned = cast("PinnedMemory", None)
    chosen = open_mover_module._find_mover(
        pool, LAYOUT, pinned, lambda: arena, time.monotonic, is_locked=False
    )
    assert chosen.mover.name == "nixl"
    moved = {row[0] for handle in api.handles for row in handle.local.tolist()}
    bounce = min(start for start, size in api.registered.items() if size >= BOUNCE_BYTES)
    assert not any(bounce <= start < bounce + 2 * BOUNCE_BYTES for start in moved)
    assert len(api.registered) == 3  # pool, buffer, arena
    chosen.mover.close()


@pytest.mark.gpu
@pytest.mark.parametrize("is_locked", [True, False])
def test_arena_that_is_locked_or_not_is_measured_on_a_gpu_as_it_is(
    is_locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BlockPool(block_bytes=LAYOUT.block_bytes, capacity_blocks=80, device="cuda")
    found: list[bool] = []

    def look(
        makers: dict[str, Callable[[], SectionMover]],
        pool: BlockPool,
        widths: Sequence[int],
        part: memoryview,
        **others: Callable[[], float],
    ) -> object:
        found.append(torch.frombuffer(part, dtype=torch.uint8).is_pinned())
        return make_fastest(makers, pool, widths, part, **others)

    monkeypatch.setattr(open_mover_module, "make_fastest", look)
    if not is_locked:
        monkeypatch.setattr(pinned_module, "find_lack", lambda *_: "no room")
    arena = np.zeros(2 << 20, np.uint8)
    first = -arena.ctypes.data % 4096
    view = arena[first : first + (1 << 20)].data
    with open_mover(pool, LAYOUT, lambda: view, clock=time.monotonic) as opened:
        assert opened.rates
    assert found == [is_locked]


@pytest.mark.gpu
def test_pool_on_a_gpu_gets_a_mover_that_was_measured() -> None:
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
