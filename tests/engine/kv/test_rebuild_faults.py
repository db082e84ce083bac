"""Whose fault it is that lost shards are not rebuilt on a GPU. Needs none: nothing is computed."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
import torch

from engine.block_pool import BlockPool
from engine.errors import DeviceFull, DeviceLost, TransferFailed
from engine.kv import cuda_rebuild, rebuild_choice
from engine.kv.block_list import BlockList
from engine.kv.cuda_rebuild import CheckedTransfer, GpuRebuilder, ShardKernels
from engine.kv.cuda_transfer import EventTransfer
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import EndedTransfer
from engine.kv.rebuild_choice import find_rebuilder
from kvstore.client import ArenaRun, BlockingAgentClient, BlockLayout, Section
from kvstore.errors import AgentUnreachable
from tests.engine.kv.lost_shards import LostRun
from tests.engine.stored_prompt import StoredPrompt

LAYOUT = BlockLayout((Section("a", 2_560), Section("b", 10_240)))


class Kernelless:
    """Stands for the kernels of a GPU: it has room, and nothing can be compiled."""

    k, m, stream = 10, 2, None
    block_bytes = LAYOUT.block_bytes

    def make_parity(self, blocks: int) -> torch.Tensor:
        return torch.zeros((blocks, 2, LAYOUT.block_bytes // 10), dtype=torch.uint8)

    def queue(self, *_: object) -> NoReturn:
        raise FileNotFoundError(2, "No such file or directory", "nvcc")


@pytest.fixture
def host_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `GpuRebuilder` asks of a GPU, of which nothing is there."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(cuda_rebuild, "all_queued", lambda device, stream: [])


def rebuild_without_compiler(run: LostRun) -> None:
    pool = BlockPool(block_bytes=LAYOUT.block_bytes, capacity_blocks=2)
    rebuilder = GpuRebuilder(pool, MemcpyMover(pool, LAYOUT), cast("ShardKernels", Kernelless()))
    rebuilder.bring(cast("ArenaRun", run), run.keys, run.blocks_lost, BlockList([0, 1]))


@pytest.mark.usefixtures("host_as_gpu")
def test_rebuild_that_cannot_be_compiled_is_no_fault_of_the_store(rng: Random) -> None:
    run = LostRun(LAYOUT, [(3,), (4,)], rng, k=10, m=2)
    with pytest.raises(TransferFailed, match=r"^rebuild on cpu: .*No such file .*: 'nvcc'$"):
        rebuild_without_compiler(run)


@pytest.mark.usefixtures("host_as_gpu")
def test_agent_that_goes_in_the_middle_of_a_rebuild_is_no_fault_of_the_device(
    rng: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(first: int, end: int) -> NoReturn:
        raise AgentUnreachable("agent.sock", "it has gone")

    run = LostRun(LAYOUT, [(3,), (4,)], rng, k=10, m=2)
    monkeypatch.setattr(run, "parity", fail)
    with pytest.raises(AgentUnreachable):
        rebuild_without_compiler(run)


@pytest.mark.parametrize(
    ("fault", "error"),
    [(torch.OutOfMemoryError, DeviceFull), (torch.AcceleratorError, DeviceLost)],
)
def test_device_that_is_full_or_lost_is_no_reason_to_have_the_agent_rebuild(
    fault: type[RuntimeError], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise fault("CUDA error: no luck\nand advice")

    monkeypatch.setattr(rebuild_choice, "_find_code", lambda *_: (10, 2))
    monkeypatch.setattr(cuda_rebuild, "ShardKernels", fail)
    device = torch.device("cuda", 0)
    memory = SimpleNamespace(device=device)
    pool = SimpleNamespace(memory=memory, device=device, block_bytes=LAYOUT.block_bytes)
    on_host = BlockPool(block_bytes=LAYOUT.block_bytes, capacity_blocks=1)
    with pytest.raises(error, match=r"CUDA error: no luck$"):
        find_rebuilder(
            cast("BlockingAgentClient", None),
            StoredPrompt(1, layout=LAYOUT).namespace,
            cast("BlockPool", pool),
            MemcpyMover(on_host, LAYOUT),
            clock=lambda: 0.0,
        )


def test_deadline_of_a_rebuild_begins_when_what_it_is_made_of_has_come() -> None:
    steps: list[str] = []

    class Waited(EndedTransfer):
        def __init__(self, name: str) -> None:
            self._name = name

        def wait(self) -> None:
            steps.append(self._name)

    rebuilt = cast("EventTransfer", Waited("rebuilt"))
    behind = [Waited("sections"), Waited("parity")]
    CheckedTransfer(rebuilt, lambda: steps.append("check"), behind).wait()
    assert steps == ["sections", "parity", "rebuilt", "check"]
