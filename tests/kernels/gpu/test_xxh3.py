"""XXH3-64 of shards on a GPU: the bits of the CPU's."""

from random import Random

import pytest
import torch
from xxhash import xxh3_64_intdigest

from kernels.gpu import xxh3 as gpu
from kernels.gpu.compiler import lower_to_cuda
from kernels.reference.xxh3 import hash_shards, signed
from tests.kernels.gpu.cuda_on_cpu import ARCHITECTURES, run_on_cpu

LENGTHS = (256, 320, 1024, 1088, 1152, 2048, 2112, 11_392)
"""Shorter than a round, whole rounds, one stripe more or less, and the shard of V4.1-Flash."""
ROWS, ROW_SHARDS = 5, 3
ROW_IDS = [4, 0, 2]
SHARDS = [[1, -1], [2, 0], [-1, -1]]


def make_rows(shard_bytes: int, rng: Random) -> torch.Tensor:
    data = bytearray(rng.randbytes(ROWS * ROW_SHARDS * shard_bytes))
    return torch.frombuffer(data, dtype=torch.uint8).view(ROWS, -1)


def on_device(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.tensor(ROW_IDS, dtype=torch.int32, device=device),
        torch.tensor(SHARDS, dtype=torch.int32, device=device),
    )


def expected_hashes(rows: torch.Tensor, shard_bytes: int) -> list[list[int]]:
    def digest(row: int, shard: int) -> int:
        first = shard * shard_bytes
        return xxh3_64_intdigest(rows[row, first : first + shard_bytes].numpy().data)

    return [
        [signed(digest(row, shard)) if shard >= 0 else 0 for shard in shards]
        for row, shards in zip(ROW_IDS, SHARDS, strict=True)
    ]


@pytest.mark.parametrize("shard_bytes", LENGTHS)
def test_reference_has_the_bits_of_xxhash(shard_bytes: int, rng: Random) -> None:
    rows = make_rows(shard_bytes, rng)
    found = hash_shards(rows, *on_device("cpu"), shard_bytes)
    assert found.tolist() == expected_hashes(rows, shard_bytes)


@pytest.mark.parametrize("shard_bytes", [256, 1088, 11_392])
def test_lowered_source_has_the_bits_of_xxhash_when_it_runs_on_the_cpu(
    shard_bytes: int, rng: Random
) -> None:
    rows = make_rows(shard_bytes, rng)
    ids, shards = on_device("cpu")
    hashes = torch.full(shards.shape, -1)
    run_on_cpu(
        gpu.hash_program(shard_bytes, ROW_SHARDS, shards.shape[1]),
        (1,),
        rows=rows.view(torch.int64),
        row_ids=ids,
        shards=shards,
        constants=gpu.make_constants(shard_bytes, rows.device),
        hashes=hashes,
        count=len(ids),
        row_count=ROWS,
    )
    assert hashes.tolist() == expected_hashes(rows, shard_bytes)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernel_is_lowered_with_accesses_of_16_bytes(arch: str) -> None:
    source = lower_to_cuda(gpu.hash_program(11_392, 10, 2), arch)
    assert source.count("*(longlong2*)(word + 0) = *(longlong2*)(rows") == 3


@pytest.mark.parametrize(
    ("shape", "ids", "shards", "shard_bytes"),
    [
        ((2, 512), 1, (1, 1), 192),  # too short
        ((2, 600), 1, (1, 1), 300),  # no whole stripes
        ((2, 500), 1, (1, 1), 256),  # no whole shards
        ((2, 512), 2, (1, 1), 256),  # another number of rows
        ((2, 512), 1, (1,), 256),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    shape: tuple[int, int], ids: int, shards: tuple[int, ...], shard_bytes: int
) -> None:
    arguments = (
        torch.zeros(shape, dtype=torch.uint8),
        torch.zeros(ids, dtype=torch.int32),
        torch.zeros(shards, dtype=torch.int32),
        shard_bytes,
    )
    for operation in (hash_shards, gpu.hash_shards):
        with pytest.raises(ValueError, match="expected"):
            operation(*arguments)


def test_other_types_are_refused() -> None:
    rows, ids = torch.zeros(2, 512, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match="expected uint8, int32 and int32"):
        hash_shards(rows, ids, torch.zeros(1, 1, dtype=torch.int64), 256)


@pytest.mark.gpu
@pytest.mark.parametrize("shard_bytes", LENGTHS)
def test_kernel_has_the_bits_of_xxhash(shard_bytes: int, rng: Random) -> None:
    rows = make_rows(shard_bytes, rng)
    found = gpu.hash_shards(rows.cuda(), *on_device("cuda"), shard_bytes)
    assert found.tolist() == expected_hashes(rows, shard_bytes)
