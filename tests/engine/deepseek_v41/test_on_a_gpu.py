"""On a GPU a sequence has the same bits however it is cut, and goes on from what was stored.

The products there are of one height, and libraries treat the rows of a product alike without
promising it (docs/decisions/0038): that is what these tests are for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from engine.models.deepseek_v41.handover import (
    open_block_bytes,
    pack_state,
    restore_window,
    unpack_state,
)
from engine.models.deepseek_v41.host_bytes import write_bytes
from engine.models.deepseek_v41.rows import Chunk
from engine.upload import upload
from kernels.cuda.operations import CUDA_OPERATIONS

from .greedy import MODEL_ID
from .model_bench import ModelBench, nano_bench

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

LENGTH = 700


@contextmanager
def no_wait() -> Iterator[None]:
    """Whatever waits for the device in it, by any way that PyTorch knows of, is an error."""
    with warnings.catch_warnings():
        # It says of itself that it does not know of all.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module", params=["plain", "compiled"])
def bench(request: pytest.FixtureRequest) -> ModelBench:
    operations = CUDA_OPERATIONS
    if request.param == "compiled":
        # Here: it imports TileLang, which takes seconds where nothing of this is run.
        from kernels.gpu.operations import COMPILED_OPERATIONS as operations
    return nano_bench(device="cuda", operations=operations)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(3, 380, (LENGTH,), generator=generator).tolist()


def run(
    bench: ModelBench, token_ids: Sequence[int], cuts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, blocks and slot of a new sequence, on the host."""
    state = bench.begin(len(token_ids))
    bench.blocks.memory[state.block_ids] = 0
    state.memory.zero_()
    logits = bench.run(state, token_ids, cuts)
    blocks, slot = bench.cache_bytes(state)
    bench.end(state)
    return logits.cpu(), blocks.cpu(), slot.cpu()


@pytest.mark.parametrize("cuts", [[1] * 20, [256, 256], [300, 7, 1, 129], [511]])
def test_bits_do_not_depend_on_the_cut(
    bench: ModelBench, token_ids: list[int], cuts: list[int]
) -> None:
    for given, expected in zip(run(bench, token_ids, cuts), run(bench, token_ids, ()), strict=True):
        assert torch.equal(given, expected)


def test_bits_do_not_depend_on_what_runs_beside(bench: ModelBench, token_ids: list[int]) -> None:
    alone, _, _ = run(bench, token_ids[:200], ())
    state, other = bench.begin(200), bench.begin(300)
    result = bench.model.forward(
        [
            Chunk(state=other, token_ids=token_ids[300:577]),
            Chunk(state=state, token_ids=token_ids[:200]),
        ],
        wants_all_logits=True,
    )
    assert torch.equal(result.logits[1].cpu(), alone)
    bench.end(state)
    bench.end(other)


def test_pass_without_logits_waits_for_nothing(bench: ModelBench, token_ids: list[int]) -> None:
    state = bench.begin(600)
    # Tables of what a code stands for are made once.
    bench.model.forward([Chunk(state=state, token_ids=token_ids[:20])])
    with no_wait():
        bench.model.forward([Chunk(state=state, token_ids=token_ids[20:400], decoder_first=600)])
    bench.end(state)


def test_wait_for_the_device_is_found() -> None:
    """That `no_wait` can fail."""
    with no_wait(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(4, device="cuda").sum().item()


def test_first_tokens_are_near_those_of_the_reference(
    bench: ModelBench, token_ids: list[int]
) -> None:
    """Later a choice may fall otherwise, for the last bit of a number."""
    here, _, _ = run(bench, token_ids[:40], ())
    there, _, _ = run(nano_bench(), token_ids[:40], ())
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)


def test_hit_with_a_window_goes_on_with_the_bits_of_a_cold_run(
    bench: ModelBench, token_ids: list[int]
) -> None:
    hit, end = 384, 600
    cold = bench.begin(end)
    bench.run(cold, token_ids[:hit], decoder_first=hit)
    record = cold.copy_stored_window(hit).cpu()
    expected = bench.run(cold, token_ids[hit:end], decoder_first=hit)

    state = bench.begin(end)
    stored = torch.tensor(cold.block_ids[: hit // 128])
    bench.blocks.memory[torch.tensor(state.block_ids[: hit // 128])] = bench.blocks.memory[stored]
    state.start_at(hit, bench.model.recent_ids_of(token_ids[:hit]))
    restore_window(state, record.numpy().data)
    assert torch.equal(bench.run(state, token_ids[hit:end], decoder_first=hit), expected)
    bench.end(state)
    bench.end(cold)


def test_state_goes_over_to_another_sequence_with_all_its_bytes(
    bench: ModelBench, token_ids: list[int]
) -> None:
    state = bench.begin(LENGTH)
    bench.run(state, token_ids[:333])
    states, blocks = bench.states, bench.blocks
    packed = pack_state(state, states=states, blocks=blocks, model_id=MODEL_ID)
    other = unpack_state(packed, states=states, blocks=blocks, model_id=MODEL_ID)
    assert torch.equal(other.memory, state.memory)
    open_blocks = [open_block_bytes(one, states=states, blocks=blocks) for one in (state, other)]
    assert open_blocks[0] == open_blocks[1]
    other.block_ids += bench.blocks.allocate(3)
    logits = [bench.run(one, token_ids[333:400]) for one in (state, other)]
    assert torch.equal(*logits)
    bench.end(state)
    bench.end(other)


def test_bytes_and_ids_of_the_host_go_to_a_busy_device_without_a_wait() -> None:
    memory = torch.zeros(1 << 21, dtype=torch.uint8, device="cuda")
    ids = torch.arange(1 << 18)
    data = bytearray(torch.arange(1 << 21).to(torch.uint8).numpy())
    expected = bytes(data)
    with no_wait():
        for value in (7, 8):
            memory.fill_(value)
            write_bytes(memory, data)
        on_device = upload(ids, memory.device)
    data[:], kept = bytes(len(data)), ids.clone()
    ids.zero_()
    assert memory.cpu().numpy().tobytes() == expected
    assert torch.equal(on_device.cpu(), kept)
