"""A window's record, made where the slot lies, is what a state stores of itself."""

import random

import pytest
import torch

from engine.errors import HandoverRefused
from engine.models.deepseek_v41.handover import restore_window
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import StatePool
from engine.models.deepseek_v41.stored_window import make_record, window_shape
from tests.engine.deepseek_v41.one_device import DEVICE, OneDevice

CONFIG = shipped_config("v41-nano")


@pytest.mark.parametrize("drafted", [0, 1, CONFIG.draft.block_tokens + 1])
@pytest.mark.parametrize("anchor", [128, 384])
def test_record_is_what_the_state_stores(anchor: int, drafted: int, rng: random.Random) -> None:
    pool = StatePool(CONFIG, slots=2)
    pool.memory[:] = _random_bytes(rng, *pool.memory.shape)
    pool.allocate()
    state = pool.allocate()
    length = anchor + drafted
    for layer in range(CONFIG.layers):
        rows = _random_bytes(rng, length, pool.offsets.rings[layer].row_bytes)
        state.write_window_rows(layer, 0, rows)
    state.advance(length, [0] * length)
    stored = state.copy_stored_window(anchor)
    record = make_record(state.memory, anchor, window_shape(CONFIG, pool.offsets))
    assert torch.equal(record, stored)


def test_record_of_a_slot_on_a_device_is_made_there() -> None:
    pool = StatePool(CONFIG, slots=2, device=DEVICE)
    shape = window_shape(CONFIG, pool.offsets)
    with OneDevice() as watch:
        record = make_record(pool.memory[1], 384, shape)
    assert record.device == DEVICE
    assert record.shape == (shape.stored_bytes,)
    assert watch.copies_in == 0


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["host", "gpu"]
)
def test_record_stays_as_it_was_and_is_the_window_of_who_goes_on_from_it(
    device: str, rng: random.Random
) -> None:
    """Whether it comes as bytes of the host or as memory of the device."""
    pool, anchor = StatePool(CONFIG, slots=3, device=device), 384
    state = pool.allocate()
    width = pool.offsets.rings[0].row_bytes
    for layer in range(CONFIG.layers):
        state.write_window_rows(layer, 0, _random_bytes(rng, anchor, width).to(device))
    state.advance(anchor, [0] * anchor)
    record = state.copy_stored_window(anchor)
    assert record.device == pool.memory.device
    # What the next pass does, at once.
    for layer in range(CONFIG.layers):
        state.write_window_rows(layer, anchor, _random_bytes(rng, 60, width).to(device))
    state.advance(60, [0] * 60)
    on_host = record.cpu().numpy().tobytes()
    for data in (record, on_host):
        follower = pool.allocate()
        follower.start_at(anchor, [0] * anchor)
        restore_window(follower, data)
        assert follower.window_memory.cpu().numpy().tobytes() == on_host
        for layer in range(CONFIG.decoder_start):
            found = follower.read_window_rows(layer, anchor - CONFIG.window, anchor)
            assert not torch.equal(found, torch.zeros_like(found))
    with pytest.raises(HandoverRefused, match="bytes of a window"):
        restore_window(follower, record[1:])


def _random_bytes(rng: random.Random, *shape: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(rng.getrandbits(62))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=numbers)
