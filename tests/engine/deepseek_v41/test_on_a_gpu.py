"""On a GPU a sequence has the same bits however it is cut, and goes on from what was stored.

The products there are of one height, and libraries treat the rows of a product alike without
promising it (docs/decisions/0038): that is what these tests are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.models.deepseek_v41.handover import (
    open_block_bytes,
    pack_state,
    restore_window,
    unpack_state,
)
from engine.models.deepseek_v41.rows import Chunk
from kernels.cuda.operations import CUDA_OPERATIONS

from .greedy import MODEL_ID
from .model_bench import ModelBench, nano_bench

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

LENGTH = 700


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return nano_bench(device="cuda", operations=CUDA_OPERATIONS)


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
    record = torch.empty(len(cold.window_memory), dtype=torch.uint8)
    cold.copy_stored_window(hit, record)
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
