"""A model of a few hundred KB with every kind of tensor, and a way to damage its files."""

import json
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.models.deepseek_v41.checkpoint.writer import write_folder
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.random_weights import random_tensors
from engine.models.deepseek_v41.shipped import shipped_config

SHARD_BYTES = 40_000
"""Cuts the tiny model into a handful of shards."""


@cache
def tiny_config() -> DeepseekV41Config:
    nano = shipped_config("v41-nano")
    assert nano.engram is not None
    assert nano.vision is not None
    return replace(
        nano,
        vocabulary=64,
        hidden=32,
        layers=4,
        heads=2,
        head_dim=32,
        window=16,
        streams=2,
        experts=2,
        experts_per_token=1,
        compress_ratios=(0, 2, 1, 1, 0, 0),
        kv_source_ids=(1, 2),
        index_source_ids=(1, 2, 3),
        index_heads=2,
        candidate_source_id=2,
        engram=replace(nano.engram, layer_ids=(1,), table_rows=(434,), compressed_vocabulary=64),
        draft=replace(
            nano.draft,
            stages=2,
            noise_token_id=63,
            target_layer_ids=(2, 3),
            experts=2,
            experts_per_token=1,
        ),
        vision=replace(nano.vision, layers=1),
        image_token_id=62,
    )


@cache
def tiny_tensors() -> dict[str, torch.Tensor]:
    return random_tensors(tiny_config(), torch.Generator().manual_seed(5))


def write_tiny(folder: Path, *, quantised: bool = False, is_sharded: bool = False) -> Path:
    limit = SHARD_BYTES if is_sharded else 1 << 30
    config, tensors = tiny_config(), tiny_tensors()
    write_folder(folder, config, tensors, quantised=quantised, shard_bytes_max=limit)
    return folder


class RawFile:
    """A safetensors file as its header and bytes, to be changed and written back as they are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        self.header: dict[str, Any] = json.loads(content[8 : 8 + length])
        self.data = bytearray(content[8 + length :])

    @property
    def names(self) -> list[str]:
        return [name for name in self.header if name != "__metadata__"]

    def rename(self, old: str, new: str) -> None:
        self.header = {new if key == old else key: entry for key, entry in self.header.items()}

    def bytes_of(self, name: str) -> memoryview:
        begin, end = self.header[name]["data_offsets"]
        return memoryview(self.data)[begin:end]

    def take(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Take a tensor out; those behind it move up."""
        taken, entry = bytes(self.bytes_of(name)), self.header.pop(name)
        begin, end = entry["data_offsets"]
        del self.data[begin:end]
        for other in self.names:
            offsets = self.header[other]["data_offsets"]
            if offsets[0] >= end:
                self.header[other]["data_offsets"] = [place - len(taken) for place in offsets]
        return entry, taken

    def put(self, name: str, entry: dict[str, Any], data: bytes) -> None:
        """Add a tensor behind all others."""
        begin = len(self.data)
        self.data += data
        self.header[name] = {**entry, "data_offsets": [begin, begin + len(data)]}

    def write(self) -> None:
        text = json.dumps(self.header).encode()
        # A file that is written over would pull the rug from under those who have it mapped.
        self.path.unlink()
        self.path.write_bytes(struct.pack("<Q", len(text)) + text + self.data)
