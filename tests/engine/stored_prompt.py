"""A prompt whose blocks and window state are known bytes, for tests of sources and sinks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import numpy as np
import torch

from engine.block_pool import BlockPool
from engine.block_store import BlockStore
from engine.window_record import WindowRecord
from kvstore.client import BlockLayout, Namespace, Section
from kvstore.layout import BLOCK_TOKENS

LAYOUT = BlockLayout((Section("L0", 4_096), Section("L1", 2_048), Section("L2", 8_192)))
WINDOW = BlockLayout((Section("w0", 1_056), Section("w1", 3_168)))
_numbers = itertools.count()


class StoredPrompt:
    """`blocks` full blocks and `rest_tokens` more, in a namespace that no other test uses."""

    def __init__(self, blocks: int, *, rest_tokens: int = 40, layout: BlockLayout = LAYOUT) -> None:
        number = next(_numbers)
        tenant = f"{os.getpid()} {number}"
        self.namespace = Namespace(
            model="m", weights="w", tokenizer="t", layout=layout, tenant=tenant
        )
        rng = np.random.default_rng(number)
        self.tokens = rng.integers(0, 1 << 16, blocks * BLOCK_TOKENS + rest_tokens).tolist()
        self.keys: Sequence[bytes] = self.namespace.block_keys(self.tokens)
        self.blocks = [rng.bytes(layout.block_bytes) for _ in range(blocks)]
        self.window = rng.bytes(WINDOW.block_bytes)

    @property
    def record(self) -> WindowRecord:
        """The window state as an engine has it."""
        return WindowRecord(torch.frombuffer(bytearray(self.window), dtype=torch.uint8))

    def pool(self, capacity_blocks: int) -> BlockPool:
        return BlockPool(
            block_bytes=self.namespace.layout.block_bytes, capacity_blocks=capacity_blocks
        )

    def save(self, store: BlockStore) -> None:
        buffers = [memoryview(bytearray(block)) for block in self.blocks]
        assert store.save(self.namespace, self.keys, buffers).failed == 0

    def section(self, block: int, section: int) -> bytes:
        start, end = section_range(self.namespace.layout, section)
        return self.blocks[block][start:end]


def section_range(layout: BlockLayout, section: int) -> tuple[int, int]:
    start = sum(one.bytes for one in layout.sections[:section])
    return start, start + layout.sections[section].bytes
