"""The model keeps to the device that its weights are on, and asks it for nothing in a pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.models.deepseek_v41.rows import Chunk, ImageRows
from engine.models.deepseek_v41.shipped import shipped_config
from kernels.cuda.operations import CUDA_OPERATIONS
from kernels.operations import REFERENCE

from .model_bench import ModelBench, nano_bench
from .one_device import DEVICE, OneDevice

CONFIG = shipped_config("v41-nano")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def token_ids(count: int) -> list[int]:
    return [3 + 7 * index % (CONFIG.vocabulary - 8) for index in range(count)]


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return nano_bench(device=DEVICE, operations=CUDA_OPERATIONS)


def test_nothing_of_a_prompt_is_computed_on_another_device_or_asked_for(bench: ModelBench) -> None:
    state = bench.begin(600)
    # Tables of what a code stands for are made once.
    bench.model.forward([Chunk(state=state, token_ids=token_ids(20))])
    with OneDevice() as device:
        for piece in (token_ids(300), token_ids(1)):
            result = bench.model.forward(
                [Chunk(state=state, token_ids=piece, decoder_first=200)], wants_all_logits=True
            )
            assert result.logits[0].device == DEVICE
    # Token ids, ids for Engram and block ids of each pass.
    assert device.copies_in == 2 * 3
    assert device.calls["aten::mm"] > 0
    bench.end(state)


def test_sequences_side_by_side_and_an_image_keep_to_the_device(bench: ModelBench) -> None:
    state, other = bench.begin(300), bench.begin(300)
    ids = token_ids(40)
    is_image = torch.arange(40) < 7
    image = ImageRows(is_image_T=is_image, embeddings=torch.ones(7, CONFIG.hidden))
    with OneDevice() as device:
        bench.model.forward(
            [
                Chunk(state=state, token_ids=ids, image=image),
                Chunk(state=other, token_ids=token_ids(133), decoder_first=100),
            ]
        )
        bench.model.forward([Chunk(state=one, token_ids=[5]) for one in (state, other)])
    assert device.calls["aten::mm"] > 0
    bench.end(state)
    bench.end(other)


def test_sequence_that_goes_on_from_a_stored_window_keeps_to_the_device(bench: ModelBench) -> None:
    state = bench.begin(600)
    ids = token_ids(500)
    state.start_at(256, bench.model.recent_ids_of(ids[:256]))
    state.hold_stored_window()
    with OneDevice() as device:
        bench.model.forward([Chunk(state=state, token_ids=ids[256:], decoder_first=384)])
        state.rewind(498)
        bench.model.forward([Chunk(state=state, token_ids=ids[498:])])
    assert device.calls["aten::mm"] > 0
    bench.end(state)


def test_weights_of_a_shorter_type_keep_to_the_device() -> None:
    bench = nano_bench(device=DEVICE, operations=CUDA_OPERATIONS, dtype=torch.bfloat16)
    state = bench.begin(300)
    with OneDevice():
        result = bench.model.forward([Chunk(state=state, token_ids=token_ids(300))])
    assert result.logits[0].dtype == torch.float32


def test_an_operation_that_asks_the_device_is_found() -> None:
    """That the watch can fail: the reference counts what was chosen, to skip the rest."""
    asking = replace(CUDA_OPERATIONS, run_experts=REFERENCE.run_experts)
    bench = nano_bench(device=DEVICE, operations=asking)
    state = bench.begin(10)
    with OneDevice(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        bench.model.forward([Chunk(state=state, token_ids=token_ids(10))])


def test_an_operation_over_two_devices_is_found() -> None:
    with OneDevice(), pytest.raises(AssertionError, match="tensors of"):
        torch.ones(4, device=DEVICE)[torch.arange(2)]
