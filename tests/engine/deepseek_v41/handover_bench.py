"""Pools of one process, and states in them whose rows say what they are of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.block_pool import BlockPool
from engine.models.deepseek_v41.block_cache import BlockCache
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.handover import pack_slot, pack_state, unpack_slot, unpack_state
from engine.models.deepseek_v41.layout import block_layout, owner_offsets
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import SequenceState, StatePool

NANO = shipped_config("v41-nano")
MODEL_ID = bytes(range(32))
LENGTHS = (0, 1, 7, 31, 32, 33, 127, 128, 129, 130, 255, 256, 257)


@dataclass(eq=False)
class Engine:
    """Pools of one process, full of `fill` at first."""

    states: StatePool
    blocks: BlockPool
    cache: BlockCache

    @staticmethod
    def make(
        fill: int = 0,
        *,
        config: DeepseekV41Config = NANO,
        is_padded: bool = False,
        slots: int = 2,
        capacity_blocks: int = 6,
    ) -> Engine:
        block_bytes = block_layout(config, is_padded=is_padded).block_bytes
        blocks = BlockPool(block_bytes=block_bytes, capacity_blocks=capacity_blocks)
        # Padding is never written, so it is zero in every pool.
        blocks.memory[:, : block_layout(config).block_bytes] = fill
        states = StatePool(config, slots)
        states.memory.fill_(fill)
        return Engine(states, blocks, BlockCache(config, blocks))

    def grow(self, state: SequenceState, tokens: int) -> None:
        """Write the rows and entries of further tokens, each of bytes that its position gives."""
        first, end = state.length, state.length + tokens
        missing = -(-end // 128) - len(state.block_ids)
        state.block_ids += self.blocks.allocate(max(missing, 0))
        for ring in range(len(state.window_rings)):
            state.write_window_rows(ring, first, rows_of(ring, first, end, 66))
        for owner in state.compressor_rings:
            numbers = rows_of(owner, first, end, 128).float().view(-1, 2, 64)
            state.write_compressor_rows(owner, first, numbers)
        block_ids = torch.tensor(state.block_ids, dtype=torch.int64)
        for layer, offsets in owner_offsets(NANO).items():
            entries = range(first // offsets.ratio, end // offsets.ratio)
            keys = self.cache.index_keys(layer, block_ids)
            for paged in (self.cache.main_entries(layer, block_ids), keys.data, keys.scales):
                row_bytes = paged.pages.shape[2]
                paged.write(entries.start, rows_of(layer, entries.start, entries.stop, row_bytes))
        state.advance(tokens, [position % 384 for position in range(first, end)])

    def begin(self, tokens: int) -> SequenceState:
        state = self.states.allocate()
        self.grow(state, tokens)
        return state

    def pack(self, state: SequenceState) -> bytes:
        return pack_state(state, states=self.states, blocks=self.blocks, model_id=MODEL_ID)

    def unpack(self, data: bytes | bytearray) -> SequenceState:
        return unpack_state(data, states=self.states, blocks=self.blocks, model_id=MODEL_ID)

    def pack_slot(self, state: SequenceState) -> tuple[bytes, bytes]:
        slot = bytearray(self.states.offsets.state_bytes)
        header = pack_slot(
            state, memoryview(slot), states=self.states, blocks=self.blocks, model_id=MODEL_ID
        )
        return header, bytes(slot)

    def unpack_slot(self, state: SequenceState, header: bytes, slot: bytes, length: int) -> None:
        unpack_slot(
            state,
            header,
            slot,
            length=length,
            states=self.states,
            blocks=self.blocks,
            model_id=MODEL_ID,
        )

    def contents(self) -> tuple[bytes, bytes, int, int]:
        """All bytes and what is free."""
        states, blocks = self.states, self.blocks
        memory = states.memory.numpy().tobytes(), blocks.memory.numpy().tobytes()
        return *memory, states.free_slots, blocks.free_blocks


def rows_of(place: int, first: int, end: int, row_bytes: int) -> torch.Tensor:
    """uint8 [end - first, row bytes], none of it zero; a row depends on its own position only."""
    positions = torch.arange(first, end).unsqueeze(1)
    return ((positions * 31 + torch.arange(row_bytes) * 7 + place) % 250 + 1).to(torch.uint8)
