"""Writes a model's folder in the released format: safetensors shards, an index, config.json.

Files appear whole: each is written under another name, brought to the disk, then renamed;
config.json is taken away first and comes back last, so that a folder with one is complete.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kernels.reference import weight_formats
from kvstore.model_place import CONFIG_NAME

from ....errors import ModelFileError
from ..config import DeepseekV41Config
from ..config_file import config_text
from ..config_rules import find_problems
from .files import INDEX_NAME, SHARD_NAME, WHOLE_NAME
from .tensor_checks import (
    PACKED_DTYPES,
    SCALE_DTYPE,
    describe,
    find_tensor_problems,
    find_value_problems,
)
from .tensor_file import StoredTensor
from .tensor_schema import Storage, TensorSpec, scale_name, tensor_schema

SHARD_BYTES_MAX = 5 << 30
PARTIAL = ".partial-"
"""Before the name of a file that is not whole yet."""

QUANTISERS: Mapping[Storage, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    Storage.FP8_BLOCKS: weight_formats.quantise_fp8_blocks,
    Storage.FP4_ROWS: weight_formats.quantise_fp4_rows,
    Storage.FP8_ROWS: weight_formats.quantise_fp8_rows,
}


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a stored tensor comes from: `part` 0 or 1 of quantised `tensor`, or all of it."""

    tensor: str
    storage: Storage
    part: int | None
    stored: StoredTensor


def write_folder(
    path: str | Path,
    config: DeepseekV41Config,
    tensors: Mapping[str, torch.Tensor],
    *,
    quantised: bool = False,
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> None:
    """Write a folder that `open_folder` gives back with equal values.

    Tensors are stored with the type they have; with `quantised`, those that the released files keep
    in FP8 or FP4 are quantised first, unless they are already. A checkpoint that is there is
    replaced. Raises ModelFileError with every sizes rule, name, shape, type or value that is wrong,
    before anything is written; OSError if the disk refuses.
    """
    path = Path(path)
    sources, problems = _plan(config, tensors, quantised)
    if problems:
        raise ModelFileError(path, problems)
    shards = plan_shards({n: s.stored.stored_bytes for n, s in sources.items()}, shard_bytes_max)
    names = _shard_names(len(shards))
    index = [INDEX_NAME] if len(shards) > 1 else []
    is_quantised = any(source.stored.dtype == SCALE_DTYPE for source in sources.values())
    path.mkdir(parents=True, exist_ok=True)
    try:
        for name, members in zip(names, shards, strict=True):
            _save_shard(path, name, tensors, {m: sources[m] for m in members})
        if index:
            _save_text(path, INDEX_NAME, _index_text(names, shards, sources))
        _save_text(path, CONFIG_NAME, config_text(config, quantised=is_quantised))
        _publish(path, [*names, *index])
    finally:
        for name in (*names, INDEX_NAME, CONFIG_NAME):
            (path / (PARTIAL + name)).unlink(missing_ok=True)


def plan_shards(sizes: Mapping[str, int], bytes_max: int) -> list[list[str]]:
    """Names in their order, cut where a shard would get more than `bytes_max`.

    A tensor that is larger has a shard of its own.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > bytes_max:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _plan(
    config: DeepseekV41Config, tensors: Mapping[str, torch.Tensor], quantised: bool
) -> tuple[dict[str, _Source], list[str]]:
    """What is to be stored, and everything that is against it."""
    problems = find_problems(config)
    if problems:
        return {}, problems
    schema, given = tensor_schema(config), describe(tensors)
    problems = find_tensor_problems(schema, given) or find_value_problems(tensors)
    if problems:
        return {}, problems
    sources = _plan_sources(schema, given, quantised)
    return sources, _unquantisable(schema, sources)


def _plan_sources(
    schema: Mapping[str, TensorSpec], given: Mapping[str, StoredTensor], quantised: bool
) -> dict[str, _Source]:
    """Stored names in the order of the model, each scale after its tensor."""
    sources = {}
    for name, spec in schema.items():
        scale = scale_name(name)
        if quantised and spec.may_be_quantised and scale not in given:
            packed = StoredTensor(PACKED_DTYPES[spec.storage], spec.packed_shape)
            scales = StoredTensor(SCALE_DTYPE, spec.scale_shape)
            sources[name] = _Source(name, spec.storage, 0, packed)
            sources[scale] = _Source(name, spec.storage, 1, scales)
            continue
        sources[name] = _Source(name, spec.storage, None, given[name])
        if spec.may_be_quantised and scale in given:
            sources[scale] = _Source(scale, spec.storage, None, given[scale])
    return sources


def _unquantisable(schema: Mapping[str, TensorSpec], sources: Mapping[str, _Source]) -> list[str]:
    return [
        f"{name}: {schema[name].shape[-1]} channels cannot be stored as "
        f"{schema[name].storage.value}"
        for name, source in sources.items()
        if source.part == 0 and not schema[name].fits_quantised
    ]


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [WHOLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _save_shard(
    path: Path, name: str, tensors: Mapping[str, torch.Tensor], sources: Mapping[str, _Source]
) -> None:
    stored = {}
    packed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for member, source in sources.items():
        tensor = tensors[source.tensor].detach()
        if source.part is not None:
            if source.tensor not in packed:
                packed[source.tensor] = QUANTISERS[source.storage](tensor)
            tensor = packed[source.tensor][source.part]
        # The library refuses tensors that share memory, as the experts of a stack do.
        stored[member] = tensor.to("cpu", copy=True).contiguous()
    partial = path / (PARTIAL + name)
    try:
        save_file(stored, partial, metadata={"format": "pt"})
    except SafetensorError as error:
        # What it wraps is the system's error: the tensors are sound.
        raise OSError(f"{partial} cannot be written ({error})") from error
    _sync(partial)


def _index_text(
    names: Iterable[str], shards: list[list[str]], sources: Mapping[str, _Source]
) -> str:
    places = {
        member: name for name, members in zip(names, shards, strict=True) for member in members
    }
    total = sum(source.stored.stored_bytes for source in sources.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return json.dumps(index, indent=2) + "\n"


def _save_text(path: Path, name: str, text: str) -> None:
    partial = path / (PARTIAL + name)
    partial.write_text(text, encoding="utf-8")
    _sync(partial)


def _publish(path: Path, names: list[str]) -> None:
    (path / CONFIG_NAME).unlink(missing_ok=True)
    # Before any other file goes or comes: with its config.json, a mixture could be opened.
    _sync(path)
    for file in path.iterdir():
        # A writer that was killed leaves partial files behind.
        name = file.name.removeprefix(PARTIAL)
        is_ours = name in (WHOLE_NAME, INDEX_NAME) or SHARD_NAME.fullmatch(name)
        if is_ours and name not in names:
            file.unlink()
    for name in (*names, CONFIG_NAME):
        if name == CONFIG_NAME:
            _sync(path)
        (path / (PARTIAL + name)).rename(path / name)
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
