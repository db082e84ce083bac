"""Every byte of a block and of a state stands where the format says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.models.deepseek_v41.block_cache import BlockCache
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.layout import (
    block_layout,
    handover_layout,
    owner_offsets,
    state_offsets,
    window_layout,
)
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import StatePool
from kernels.reference.index_entries import dequantise_index_entries, quantise_index_entries
from kernels.reference.main_entries import dequantise_main_entries, quantise_main_entries
from kernels.reference.window_rows import dequantise_window_rows, quantise_window_rows
from tests.golden_folder import golden_folder

FLASH = shipped_config("v41-flash")
NANO = shipped_config("v41-nano")

# layer, entries, index data at, index scales at, main at, main bytes, end (formats/v41-block.md)
FLASH_OWNERS = [
    (2, 64, 0, 4_096, 4_352, 18_432, 22_784),
    (8, 64, 22_784, 26_880, 27_136, 18_432, 45_568),
    (14, 64, 45_568, 49_664, 49_920, 18_432, 68_352),
    (20, 128, 68_352, 76_544, 77_056, 36_864, 113_920),
]


def test_block_of_flash_has_the_offsets_of_the_format() -> None:
    owners = owner_offsets(FLASH)
    assert list(owners) == [2, 8, 14, 20]
    found = [
        (
            owner.layer,
            owner.entries,
            owner.index_data.offset,
            owner.index_scales.offset,
            owner.main.offset,
            owner.main.bytes,
            owner.offset + owner.bytes,
        )
        for owner in owners.values()
    ]
    assert found == FLASH_OWNERS
    row_bytes = {
        (owner.index_data.row_bytes, owner.index_scales.row_bytes, owner.main.row_bytes)
        for owner in owners.values()
    }
    assert row_bytes == {(64, 4, 288)}


def test_block_of_flash_has_a_section_for_each_owner_and_no_other_byte() -> None:
    layout = block_layout(FLASH)
    assert [section.bytes for section in layout.sections] == [22_784, 22_784, 22_784, 45_568]
    assert layout.block_bytes == 113_920 == 128 * 890


def test_padded_block_of_flash_has_128_bytes_more_at_its_end() -> None:
    layout = block_layout(FLASH, is_padded=True)
    assert layout.sections[:-1] == block_layout(FLASH).sections
    assert layout.sections[-1].bytes == 128
    assert layout.block_bytes == 114_048 == 99 * math.lcm(128, 288)
    assert layout.fingerprint != block_layout(FLASH).fingerprint


def test_padding_has_no_section_when_the_block_needs_none() -> None:
    # 2.5 entries a token, so only some key sizes make the block a multiple of 1,152 by chance.
    config = next(
        candidate
        for index_dim in range(32, 1024, 32)
        if block_layout(candidate := replace(FLASH, index_dim=index_dim)).block_bytes % 1152 == 0
    )
    assert block_layout(config, is_padded=True) == block_layout(config)


def test_window_of_flash_is_the_rings_of_the_20_encoder_layers() -> None:
    layout = window_layout(FLASH)
    assert [section.bytes for section in layout.sections] == [134 * 528] * 20
    assert layout.block_bytes == 1_415_040


def test_state_of_flash_has_the_parts_of_the_format() -> None:
    offsets = state_offsets(FLASH)
    assert [run.offset for run in offsets.rings] == [70_752 * number for number in range(43)]
    assert {(run.entries, run.row_bytes) for run in offsets.rings} == {(134, 528)}
    assert offsets.stored_bytes == 1_415_040
    assert {layer: run.offset for layer, run in offsets.compressors.items()} == {
        2: 3_042_336,
        8: 3_071_008,
        14: 3_099_680,
    }
    assert {(run.entries, run.row_bytes) for run in offsets.compressors.values()} == {(7, 4_096)}
    assert (offsets.used_bytes, offsets.state_bytes) == (3_128_352, 3_128_928)


def test_handover_of_flash_begins_with_the_window_and_ends_with_padding() -> None:
    layout = handover_layout(FLASH)
    assert layout.block_bytes == 3_128_928
    assert layout.sections[:20] == window_layout(FLASH).sections
    assert [section.bytes for section in layout.sections[20:]] == [
        *[70_752] * 23,
        *[28_672] * 3,
        576,
    ]


def test_layouts_differ_when_another_cut_has_the_same_sizes() -> None:
    """17 bytes of an index key and 18 of a main entry for each 32 channels: 18 and 17 groups."""
    one = replace(NANO, index_dim=32, head_dim=32 * 18)
    other = replace(NANO, index_dim=32 * 19, head_dim=32)
    sizes = [[s.bytes for s in block_layout(config).sections] for config in (one, other)]
    assert sizes[0] == sizes[1]
    assert block_layout(one).fingerprint != block_layout(other).fingerprint


configs = st.builds(
    lambda head_groups, index_groups, first_ratio, window: replace(
        NANO,
        head_dim=32 * head_groups,
        index_dim=32 * index_groups,
        window=window,
        compress_ratios=(0, 0, first_ratio, first_ratio, 2, 1, 1, 1, 1, 0, 0, 0),
    ),
    st.integers(1, 20),
    st.integers(1, 8),
    st.sampled_from([1 << power for power in range(1, 8)]),
    st.integers(1, 128),
)


@given(configs)
def test_runs_of_any_sizes_are_aligned_and_do_not_overlap(config: DeepseekV41Config) -> None:
    layout, end = block_layout(config), 0
    for owner, section in zip(owner_offsets(config).values(), layout.sections, strict=True):
        assert (owner.offset, owner.bytes) == (end, section.bytes)
        for run in (owner.index_data, owner.index_scales, owner.main):
            assert run.offset % 32 == 0
            assert 0 <= run.offset - end < 32
            assert run.entries == 128 // owner.ratio
            end = run.end
        end = owner.offset + owner.bytes
    assert end == layout.block_bytes
    padded = block_layout(config, is_padded=True).block_bytes
    entry_bytes = config.head_dim // 2 + config.head_dim // 16
    assert padded % 128 == padded % entry_bytes == 0
    assert 0 <= padded - layout.block_bytes < math.lcm(128, entry_bytes)


@given(configs)
def test_state_of_any_sizes_has_the_stored_part_first(config: DeepseekV41Config) -> None:
    offsets, end = state_offsets(config), 0
    for run in [*offsets.rings, *offsets.compressors.values()]:
        assert run.offset % 32 == 0
        assert 0 <= run.offset - end < 32
        end = run.end
    assert list(offsets.compressors) == [2, 4]
    assert window_layout(config).block_bytes == offsets.stored_bytes == offsets.rings[5].offset
    assert handover_layout(config).block_bytes == offsets.state_bytes >= end
    assert offsets.state_bytes % math.lcm(32, config.head_dim // 32 * 33) == 0


@pytest.mark.parametrize("is_padded", [False, True])
def test_entries_are_written_at_the_offsets_of_their_block(is_padded: bool) -> None:
    pool = BlockPool(
        block_bytes=block_layout(FLASH, is_padded=is_padded).block_bytes, capacity_blocks=4
    )
    cache = BlockCache(FLASH, pool)
    block_ids = torch.tensor([3, 1])
    generator = torch.Generator().manual_seed(1)
    expected = np.zeros(pool.memory.shape, dtype=np.uint8)
    for layer, entries, data_at, scales_at, main_at, _, _ in FLASH_OWNERS:
        keys = cache.index_keys(layer, block_ids)
        rows = {
            number: torch.randint(256, (12, number), dtype=torch.uint8, generator=generator)
            for number in (64, 4, 288)
        }
        # The last 5 entries of the first block and the first 7 of the second.
        first = entries - 5
        keys.data.write(first, rows[64])
        keys.scales.write(first, rows[4])
        cache.main_entries(layer, block_ids).write(first, rows[288])
        for at, row_bytes in ((data_at, 64), (scales_at, 4), (main_at, 288)):
            written = rows[row_bytes].numpy().reshape(-1)
            split, end = 5 * row_bytes, at + entries * row_bytes
            expected[3, end - split : end] = written[:split]
            expected[1, at : at + 7 * row_bytes] = written[split:]
        read = torch.arange(first, first + 12)
        assert torch.equal(cache.main_entries(layer, block_ids).read(read), rows[288])
        assert torch.equal(keys.data.read(read), rows[64])
        assert torch.equal(keys.scales.read(read), rows[4])
    assert np.array_equal(pool.memory.numpy(), expected)


def test_cache_refuses_a_pool_with_smaller_blocks() -> None:
    with pytest.raises(AssertionError):
        BlockCache(FLASH, BlockPool(block_bytes=113_919, capacity_blocks=1))


@pytest.fixture(scope="module")
def records() -> Iterator[np.lib.npyio.NpzFile]:
    with np.load(golden_folder() / "units" / "quant.npz") as file:
        yield file


def test_main_entries_are_the_golden_record(records: np.lib.npyio.NpzFile) -> None:
    pool = BlockPool(block_bytes=113_920, capacity_blocks=2)
    entries = BlockCache(FLASH, pool).main_entries(20, torch.tensor([1]))
    entries.write(100, quantise_main_entries(torch.from_numpy(records["record_main_x"])))
    at = 77_056 + 100 * 288
    assert bytes(pool.memory[1, at : at + 4_608].numpy()) == records["record_main_bytes"].tobytes()
    read = dequantise_main_entries(entries.read(torch.arange(100, 116)), torch.bfloat16)
    assert np.array_equal(read.float().numpy(), records["record_main_dequant_bf16"])


def test_index_keys_are_the_golden_record(records: np.lib.npyio.NpzFile) -> None:
    """64 entries are all of a block: data and scales as they stand in it."""
    pool = BlockPool(block_bytes=113_920, capacity_blocks=2)
    keys = BlockCache(FLASH, pool).index_keys(8, torch.tensor([1]))
    data, scales = quantise_index_entries(torch.from_numpy(records["record_index_x"]))
    keys.data.write(0, data)
    keys.scales.write(0, scales)
    golden = records["record_index_bytes"].tobytes()
    assert bytes(pool.memory[1, 22_784 : 22_784 + 4_352].numpy()) == golden
    rows = torch.arange(64)
    read = dequantise_index_entries(keys.data.read(rows), keys.scales.read(rows), torch.bfloat16)
    assert np.array_equal(read.float().numpy(), records["record_index_dequant_bf16"])


def test_window_rows_are_the_golden_record(records: np.lib.npyio.NpzFile) -> None:
    """Positions 126 to 141 of layer 3: 8 rows to the end of the ring, 8 from its beginning."""
    state = StatePool(FLASH, slots=1).allocate()
    rows = quantise_window_rows(torch.from_numpy(records["record_swa_x"]))
    state.write_window_rows(3, 126, rows)
    golden, ring = records["record_swa_bytes"].tobytes(), 3 * 70_752
    assert bytes(state.memory[ring : ring + 8 * 528].numpy()) == golden[8 * 528 :]
    assert bytes(state.memory[ring + 126 * 528 : ring + 134 * 528].numpy()) == golden[: 8 * 528]
    read = dequantise_window_rows(state.read_window_rows(3, 126, 142), torch.bfloat16)
    assert np.array_equal(read.float().numpy(), records["record_swa_dequant_bf16"])
