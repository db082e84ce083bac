"""Where the bytes of a DeepSeek-V4.1 cache stand: in a block of 128 tokens and in a state slot.

Only sizes, order and names, all from a config; who writes and reads the bytes is `block_cache` and
`state`. Tables of the released model: docs/formats/v41-block.md and v41-state.md.

    block  owner layer: index data [entry] | index scales [entry] | main [entry: data, scales] ||
           next owner ...
    state  ring of layer 0 | ... | ring of the last encoder layer || rings of the decoder layers |
           rings of the draft stages | compressor ring of each owner of ratio > 1 | padding

What stands before the || of a state is stored as a window. Every run begins at a multiple of 32.
"""

import math
from dataclasses import dataclass

from kvstore.layout import BLOCK_TOKENS, BlockLayout, Section

from .config import (
    INDEX_SCALE_CHANNELS,
    MAIN_SCALE_CHANNELS,
    WINDOW_SCALE_CHANNELS,
    DeepseekV41Config,
    plan_layers,
)

RUN_ALIGN_BYTES = 32
"""Every run of rows begins at a multiple of it, in a block and in a state."""

PADDED_BLOCK_ALIGN_BYTES = 128
"""A padded block is a multiple of it and of a main entry."""

FLOAT_BYTES = 4
"""A number of a compressor ring is float32."""

FORMAT_NAME = "v41-v1"
"""Stands in every section's name: another order of the same bytes must never share a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRun:
    """`entries` rows of `row_bytes` each, one after the other from byte `offset` on."""

    offset: int
    entries: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return self.entries * self.row_bytes

    @property
    def end(self) -> int:
        """The byte after the run."""
        return self.offset + self.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerOffsets:
    """The share of one owner layer in a block: `bytes` from `offset` on, padding included.

    Rows of `index_data` are FP4 codes and rows of `index_scales` their UE8M0 scales; a row of
    `main` is FP4 codes, then their e4m3 scales. Entry g of a block covers its tokens
    g * ratio .. (g + 1) * ratio - 1.
    """

    layer: int
    ratio: int
    offset: int
    bytes: int
    index_data: ByteRun
    index_scales: ByteRun
    main: ByteRun

    @property
    def entries(self) -> int:
        """Entries of one block."""
        return self.main.entries


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOffsets:
    """Where the parts of a state slot stand.

    `rings` has a run for each layer, then one for each draft stage; `compressors` one for each
    owner of ratio > 1, by layer. The first `stored_bytes` are the window that a store keeps.
    """

    rings: tuple[ByteRun, ...]
    compressors: dict[int, ByteRun]
    stored_bytes: int
    used_bytes: int
    state_bytes: int


def main_entry_bytes(config: DeepseekV41Config) -> int:
    """FP4 codes and e4m3 scales of one main entry."""
    return config.head_dim // 2 + config.head_dim // MAIN_SCALE_CHANNELS


def window_row_bytes(config: DeepseekV41Config) -> int:
    """e4m3 numbers and UE8M0 scales of one window row."""
    return config.head_dim + config.head_dim // WINDOW_SCALE_CHANNELS


def compressor_rows(config: DeepseekV41Config, ratio: int) -> int:
    """Rows of a compressor ring: the open group, after a draft that was rejected whole.

    A group is open with at most ratio - 1 tokens, and a rejected draft may have written
    block_tokens + 1 rows after them.
    """
    return ratio - 1 + config.draft.block_tokens + 1


def group_tokens(config: DeepseekV41Config) -> int:
    """A sequence cut at a multiple of it has no open group in any layer."""
    return math.lcm(*(ratio for ratio in config.compress_ratios if ratio))


def align_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is `value` or more."""
    return -(-value // step) * step


def owner_offsets(config: DeepseekV41Config) -> dict[int, OwnerOffsets]:
    """The owners of one block by layer, in layer order, which is the order of their bytes."""
    owners = {}
    offset = 0
    for role in plan_layers(config):
        if role.owns_kv:
            owner = _owner_at(config, role.index, role.ratio, offset)
            owners[role.index] = owner
            offset += owner.bytes
    return owners


def _owner_at(config: DeepseekV41Config, layer: int, ratio: int, offset: int) -> OwnerOffsets:
    entries = BLOCK_TOKENS // ratio
    data, scales, main = _place_runs(
        offset,
        [
            (entries, config.index_dim // 2),
            (entries, config.index_dim // INDEX_SCALE_CHANNELS),
            (entries, main_entry_bytes(config)),
        ],
    )
    return OwnerOffsets(
        layer=layer,
        ratio=ratio,
        offset=offset,
        bytes=align_up(main.end, RUN_ALIGN_BYTES) - offset,
        index_data=data,
        index_scales=scales,
        main=main,
    )


def state_offsets(config: DeepseekV41Config) -> StateOffsets:
    """The parts of a state slot, in the order of their bytes (docs/formats/v41-state.md)."""
    row_bytes = window_row_bytes(config)
    ring_count = config.layers + config.draft.stages
    owners = [role for role in plan_layers(config) if role.owns_kv and role.ratio > 1]
    runs = _place_runs(
        0,
        [(config.ring_rows, row_bytes)] * ring_count
        + [
            (compressor_rows(config, role.ratio), 2 * config.head_dim * FLOAT_BYTES)
            for role in owners
        ],
    )
    used_bytes = align_up(runs[-1].end, RUN_ALIGN_BYTES)
    return StateOffsets(
        rings=tuple(runs[:ring_count]),
        compressors={role.index: run for role, run in zip(owners, runs[ring_count:], strict=True)},
        # The run after the last encoder layer's: the decoder has a layer, so there is one.
        stored_bytes=runs[config.decoder_start].offset,
        used_bytes=used_bytes,
        state_bytes=align_up(used_bytes, math.lcm(RUN_ALIGN_BYTES, row_bytes)),
    )


def _place_runs(offset: int, sizes: list[tuple[int, int]]) -> list[ByteRun]:
    """Runs of (entries, row bytes), one after the other, each at an aligned offset."""
    runs = []
    for entries, row_bytes in sizes:
        run = ByteRun(offset=offset, entries=entries, row_bytes=row_bytes)
        runs.append(run)
        offset = align_up(run.end, RUN_ALIGN_BYTES)
    return runs


def block_layout(config: DeepseekV41Config, *, is_padded: bool = False) -> BlockLayout:
    """Layout of one block: a section for each owner layer, in layer order.

    `is_padded` adds a last section that makes the block a multiple of 128 bytes and of a main
    entry, if it is not one already.
    """
    owners = owner_offsets(config).values()
    sections = [
        Section(
            f"L{owner.layer} r{owner.ratio} index{config.index_dim} main{config.head_dim} "
            f"{FORMAT_NAME}",
            owner.bytes,
        )
        for owner in owners
    ]
    used_bytes = sum(owner.bytes for owner in owners)
    step = math.lcm(PADDED_BLOCK_ALIGN_BYTES, main_entry_bytes(config))
    padding_bytes = align_up(used_bytes, step) - used_bytes
    if is_padded and padding_bytes:
        sections.append(Section(f"padding {FORMAT_NAME}", padding_bytes))
    return BlockLayout(sections=tuple(sections))


def window_layout(config: DeepseekV41Config) -> BlockLayout:
    """Layout of a stored window: a section for each encoder layer's ring, in layer order."""
    return BlockLayout(sections=tuple(_ring_sections(config)[: config.decoder_start]))


def handover_layout(config: DeepseekV41Config) -> BlockLayout:
    """Layout of a whole state slot: rings of layers and draft stages, compressor rings, padding."""
    offsets = state_offsets(config)
    compressors = [
        Section(
            f"L{layer} compressor {run.entries}x2x{config.head_dim} {FORMAT_NAME}",
            align_up(run.bytes, RUN_ALIGN_BYTES),
        )
        for layer, run in offsets.compressors.items()
    ]
    sections = [*_ring_sections(config), *compressors]
    padding_bytes = offsets.state_bytes - offsets.used_bytes
    if padding_bytes:
        sections.append(Section(f"padding {FORMAT_NAME}", padding_bytes))
    layout = BlockLayout(sections=tuple(sections))
    assert layout.block_bytes == offsets.state_bytes
    return layout


def _ring_sections(config: DeepseekV41Config) -> list[Section]:
    names = [f"L{layer}" for layer in range(config.layers)]
    names += [f"draft{stage}" for stage in range(config.draft.stages)]
    ring_bytes = config.ring_rows * window_row_bytes(config)
    return [
        Section(
            f"{name} window {config.ring_rows}x{config.head_dim} {FORMAT_NAME}",
            align_up(ring_bytes, RUN_ALIGN_BYTES),
        )
        for name in names
    ]
