"""A window's record, made where the slot lies, is what a state stores of itself."""

import random

import pytest
import torch

from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import StatePool
from engine.models.deepseek_v41.window_record import make_record, window_shape
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
    stored = torch.empty(pool.offsets.stored_bytes, dtype=torch.uint8)
    state.copy_stored_window(anchor, stored)
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


def _random_bytes(rng: random.Random, *shape: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(rng.getrandbits(62))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=numbers)
