"""Hand-over of a V4.1 state: how long it takes to make its bytes, and to go on from them.

    python -m benchmarks.v41_handover [--config v41-flash] [--tokens 131 8192 65536]

Prints one JSON line for each length, times in ms of CPU of the one thread that works, medians:
`parts` is the header with both checksums over memory as it lies, `pack` the same and a copy,
`unpack` all checks and the copy into another slot and other blocks, `window` the stored window as a
view. `memcpy_ms` is a plain copy of the same bytes, `xxh3_ms` their checksum. Rows and entries are
noise: no model is run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from xxhash import xxh3_64_intdigest

from engine.block_pool import BlockPool
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.handover import (
    handover_parts,
    pack_state,
    unpack_state,
    window_state,
)
from engine.models.deepseek_v41.layout import block_layout, window_row_bytes
from engine.models.deepseek_v41.shipped import SHIPPED_CONFIGS, shipped_config
from engine.models.deepseek_v41.state import SequenceState, StatePool
from kvstore.admin.machine import describe_machine
from kvstore.layout import BLOCK_TOKENS

MODEL_ID = bytes(32)
REPEATS = 7


def median_ms(action: Callable[[], object]) -> float:
    """Median CPU time of one call; the first, which touches fresh memory, does not count."""
    times_s = []
    for _ in range(REPEATS + 1):
        begun_s = time.thread_time()
        action()
        times_s.append(time.thread_time() - begun_s)
    return round(statistics.median(times_s[1:]) * 1e3, 3)


def fill_state(config: DeepseekV41Config, state: SequenceState, tokens: int) -> None:
    """Rows of the last positions that the rings have room for, as after a prefill."""
    generator = torch.Generator().manual_seed(1)
    first = max(tokens - config.ring_rows, 0)
    shape = (tokens - first, window_row_bytes(config))
    rows = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    for ring in range(len(state.window_rings)):
        state.write_window_rows(ring, first, rows)
    numbers = torch.randn(tokens - first, 2, config.head_dim, generator=generator)
    for owner in state.compressor_rings:
        state.write_compressor_rows(owner, first, numbers)
    state.advance(tokens, range(tokens))


def measure(config: DeepseekV41Config, tokens: int) -> dict[str, float]:
    block_count = -(-tokens // BLOCK_TOKENS)
    blocks = BlockPool(
        block_bytes=block_layout(config).block_bytes, capacity_blocks=2 * block_count
    )
    blocks.memory.random_(generator=torch.Generator().manual_seed(2))
    states = StatePool(config, slots=2)
    state = states.allocate()
    state.block_ids = blocks.allocate(block_count)
    fill_state(config, state, tokens)

    def make_parts() -> object:
        return handover_parts(state, states=states, blocks=blocks, model_id=MODEL_ID)

    def pack() -> bytes:
        return pack_state(state, states=states, blocks=blocks, model_id=MODEL_ID)

    data = pack()
    target = bytearray(len(data))

    def unpack() -> None:
        moved = unpack_state(data, states=states, blocks=blocks, model_id=MODEL_ID)
        blocks.release(moved.block_ids)
        states.release(moved)

    def copy() -> None:
        target[:] = data

    anchor = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    figures = {
        "bytes": len(data),
        "parts_ms": median_ms(make_parts),
        "pack_ms": median_ms(pack),
        "unpack_ms": median_ms(unpack),
        "memcpy_ms": median_ms(copy),
        "xxh3_ms": median_ms(lambda: xxh3_64_intdigest(data)),
    }
    if tokens - anchor <= config.ring_rows - config.window and anchor:
        figures["window_ms"] = median_ms(lambda: window_state(state, anchor))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", choices=SHIPPED_CONFIGS, default="v41-flash")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131, 8_192, 65_536])
    options = parser.parse_args()
    config = shipped_config(options.config)
    for tokens in options.tokens:
        if not 1 <= tokens <= config.positions_max:
            parser.error(f"--tokens: given {tokens}, expected 1 to {config.positions_max}")
    torch.set_num_threads(1)
    machine = describe_machine()
    for tokens in options.tokens:
        figures = measure(config, tokens)
        line = {"benchmark": "v41_handover", "config": options.config, "tokens": tokens, **figures}
        print(json.dumps({**line, "machine": machine}), flush=True)


if __name__ == "__main__":
    main()
