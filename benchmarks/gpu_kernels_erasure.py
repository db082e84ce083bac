"""Cases of `gpu_kernels`: parity and lost shards of blocks of V4.1-Flash under 10+2, checksums.

The pool is the workspace's memory. Calls take its rows in turn, so that each finds its own in
memory; what blocks have lost differs from block to block, as when nodes are down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import combinations, cycle, islice

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from erasure.code import Code
from kernels.reference.gf256 import pack_recipe

from .gpu_roofline import Case, Prepared, Workspace

K, M = 10, 2
SHARD_BYTES = 11_392
BLOCK_BYTES = K * SHARD_BYTES
LOSSES: dict[str, Sequence[tuple[int, ...]]] = {
    "encode": [(10, 11)],
    "decode_one": list(combinations(range(K), 1)),
    "decode_two": list(combinations(range(K), 2)),
}
COUNTS = (64, 600, 8192)
GOAL_BLOCK_GB_PER_S = 1000.0
ROTATIONS_MAX = 32
COMPARED_BLOCKS = 90
"""Each double loss twice."""


def erasure_cases() -> Iterator[Case]:
    for blocks in COUNTS:
        for kind in LOSSES:
            yield Case(
                operation=f"gf256_{kind}",
                sizes={"blocks": blocks, "shard_bytes": SHARD_BYTES},
                prepare=partial(_prepare_combine, kind, blocks),
                goal_block_gb_per_s=GOAL_BLOCK_GB_PER_S,
            )
        yield Case(
            operation="xxh3_of_shards",
            sizes={"blocks": blocks, "shard_bytes": SHARD_BYTES},
            prepare=partial(_prepare_hash, blocks),
        )


class Batch:
    """Blocks of a pool in the workspace, and the tensors of a call for each turn."""

    def __init__(self, blocks: int, workspace: Workspace) -> None:
        device = workspace.device
        rows = workspace.size_bytes // BLOCK_BYTES
        if not rows:
            raise ValueError(f"given {workspace.size_bytes} bytes, expected a block at least")
        self.blocks = min(blocks, rows)
        self.turns = min(ROTATIONS_MAX, rows // self.blocks)
        self.pool = workspace.source[: rows * BLOCK_BYTES].view(rows, BLOCK_BYTES)
        count = self.turns * self.blocks
        generator = torch.Generator(device).manual_seed(0)
        # Blocks of a sequence lie anywhere in a pool.
        order = torch.randperm(count, device=device, generator=generator).int()
        self.ids = order.view(self.turns, self.blocks)
        package = "kernels.gpu" if device.type == "cuda" else "kernels.reference"
        self._package = package

    def function(self, module: str, name: str) -> Callable[..., torch.Tensor]:
        """The operation for the device."""
        found: Callable[..., torch.Tensor] = getattr(
            import_module(f"{self._package}.{module}"), name
        )
        return found

    def recipes(self, kind: str) -> torch.Tensor:
        """Of each block another loss."""
        packed = [_pack(lost) for lost in islice(cycle(LOSSES[kind]), self.blocks)]
        joined = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8)
        return joined.view(self.blocks, -1).to(self.pool.device)


def _pack(lost: tuple[int, ...]) -> bytes:
    sources = [shard for shard in range(K + M) if shard not in lost][:K]
    return pack_recipe(K, M, sources, lost, Code(K, M).coefficients(lost, sources).tolist())


def _prepare_combine(kind: str, blocks: int, workspace: Workspace) -> Prepared:
    batch = Batch(blocks, workspace)
    combine_shards = batch.function("gf256", "combine_shards")
    recipes = batch.recipes(kind)
    size = batch.blocks * M * SHARD_BYTES
    areas = max(1, min(batch.turns, workspace.size_bytes // size))
    shape = (areas, batch.blocks, M, SHARD_BYTES)
    parity = workspace.target[: areas * size].view(shape)
    lost = len(LOSSES[kind][0])
    return Prepared(
        calls=[
            partial(combine_shards, batch.pool, parity[turn % areas], batch.ids[turn], recipes)
            for turn in range(batch.turns)
        ],
        moved_bytes=batch.blocks * (K + lost) * SHARD_BYTES,
        block_bytes=batch.blocks * BLOCK_BYTES,
        is_right=partial(_is_combined_right, batch, combine_shards, kind),
    )


def _is_combined_right(batch: Batch, combine_shards: Callable[..., object], kind: str) -> bool:
    """Are parity, and what is rebuilt from it, what `erasure` makes?"""
    count = min(batch.blocks, COMPARED_BLOCKS)
    ids = batch.ids[0, :count]
    whole = batch.pool[ids.long()].cpu()
    expected = torch.zeros(count, M, SHARD_BYTES, dtype=torch.uint8)
    Code(K, M).encode(
        list(whole.numpy()), list(expected.view(count, -1).numpy()), shard_bytes=SHARD_BYTES
    )
    parity = expected.to(batch.pool.device)
    if kind == "encode":
        parity.zero_()
    else:
        for block, lost in zip(ids.tolist(), islice(cycle(LOSSES[kind]), count), strict=True):
            batch.pool[block].view(K, SHARD_BYTES)[list(lost)] = 0
    combine_shards(batch.pool, parity, ids, batch.recipes(kind)[:count])
    found = batch.pool[ids.long()].cpu()
    return torch.equal(found, whole) and torch.equal(parity.cpu(), expected)


def _prepare_hash(blocks: int, workspace: Workspace) -> Prepared:
    batch = Batch(blocks, workspace)
    hash_shards = batch.function("xxh3", "hash_shards")
    shards = torch.arange(batch.blocks, dtype=torch.int32, device=workspace.device)[:, None] % K

    def is_right() -> bool:
        count = min(batch.blocks, COMPARED_BLOCKS)
        ids = batch.ids[0, :count]
        found = hash_shards(batch.pool, ids, shards[:count], SHARD_BYTES)
        rows = batch.pool[ids.long()].cpu().view(count, K, SHARD_BYTES)
        expected = [xxh3_64_intdigest(rows[at, at % K].numpy().data) for at in range(count)]
        return bool(found[:, 0].cpu().numpy().view(np.uint64).tolist() == expected)

    return Prepared(
        calls=[
            partial(hash_shards, batch.pool, batch.ids[turn], shards, SHARD_BYTES)
            for turn in range(batch.turns)
        ],
        moved_bytes=batch.blocks * SHARD_BYTES,
        is_right=is_right,
    )
