"""Opens a folder with a model: config.json and safetensors files, in the released format.

Everything that headers can tell is checked before any tensor is read, and told at once. A model is
given out whole or not at all.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch

from kvstore.model_place import CONFIG_NAME

from ....errors import MissingModel, ModelFileError
from ..build_weights import build_weights
from ..config import DeepseekV41Config
from ..config_file import config_document, read_config
from ..weights import ModelWeights
from .files import CheckpointFiles, find_files
from .tensor_checks import find_missing, find_unfit, find_value_problems
from .tensor_file import StoredTensor
from .tensor_schema import Storage, TensorSpec, scale_name, tensor_schema


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An open folder. `tensors` are read as they are asked for, quantised ones as stored.

    N-gram tables and their scales stay on disk, mapped into memory; all other tensors are copies.
    The files may be replaced by others meanwhile, but must not be written to.
    """

    path: Path
    config: DeepseekV41Config
    tensors: Mapping[str, torch.Tensor]

    @cached_property
    def sha256(self) -> str:
        """`contents_sha256` of what is stored; reads every byte of it, once."""
        return contents_sha256(self.config, self.tensors)


def open_folder(path: str | Path, *, overriding: Sequence[str] = ()) -> Checkpoint:
    """Check a folder and open it; no tensor is read yet.

    `overriding`: names of further files in it whose tensors replace those of the same name.
    Raises MissingModel if there is no such folder, ModelFileError with everything that is wrong.
    """
    path = Path(path)
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise ModelFileError(path, [f"cannot be read ({error})"]) from error
    if not is_folder:
        raise MissingModel(path, "there is no such folder")
    published = _published(path)
    config, problems = _read_config(path / CONFIG_NAME)
    files = find_files(path, overriding)
    problems += files.problems
    schema = {} if config is None else tensor_schema(config)
    if config is not None:
        problems += find_unfit(schema, files.stored)
        # Otherwise everything that a file which cannot be read holds would be missing.
        if files.is_complete:
            problems += find_missing(schema, files.stored, files.names)
    if config is None or problems:
        raise ModelFileError(path, problems)
    tensors = _open_tensors(path, schema, files)
    if _published(path) != published:
        raise ModelFileError(path, ["replaced by another while it was opened"])
    return Checkpoint(path, config, tensors)


def load_weights(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    overriding: Sequence[str] = (),
) -> tuple[DeepseekV41Config, ModelWeights]:
    """The config and the weights of a folder, all values checked to be numbers.

    Raises what `open_folder` raises. The vision encoder is built from `Checkpoint.tensors`.
    """
    checkpoint = open_folder(path, overriding=overriding)
    return checkpoint.config, build_checked(checkpoint, dtype)


def build_checked(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
) -> ModelWeights:
    """The weights of the text model, on `device`; raises ModelFileError unless all values are
    numbers."""
    require_numbers(checkpoint)
    return build_weights(checkpoint.config, checkpoint.tensors, dtype, device=device)


def require_numbers(checkpoint: Checkpoint) -> None:
    """Read every value; raise ModelFileError with each tensor that holds NaN or infinity."""
    problems = find_value_problems(checkpoint.tensors)
    if problems:
        raise ModelFileError(checkpoint.path, problems)


def contents_sha256(config: DeepseekV41Config, tensors: Mapping[str, torch.Tensor]) -> str:
    """Hex sha256 of sizes and tensors as they are stored: names, types, shapes and bytes.

    It does not depend on files, shards or the order of tensors. This is the weights revision in a
    namespace of cache keys, where the tokenizer, which Engram's ids follow from, has another place.
    """
    sizes = config_document(config, quantised=False)
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        digest.update(head.encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_config(path: Path) -> tuple[DeepseekV41Config | None, list[str]]:
    try:
        return read_config(path), []
    except ModelFileError as error:
        return None, [f"{CONFIG_NAME}: {problem}" for problem in error.problems]


def _published(path: Path) -> tuple[int, ...] | None:
    """Which config.json is there: a writer takes it away before all else and puts it last."""
    try:
        status = (path / CONFIG_NAME).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _open_tensors(
    path: Path, schema: Mapping[str, TensorSpec], files: CheckpointFiles
) -> "_StoredTensors":
    """Open the files, which need not be those whose headers were checked: so check them again."""
    try:
        readers = {
            name: safetensors.safe_open(path / name, framework="pt")
            for name in sorted(set(files.holders.values()))
        }
        slices = {name: readers[held].get_slice(name) for name, held in files.holders.items()}
        opened = {
            name: StoredTensor(part.get_dtype(), tuple(part.get_shape()))
            for name, part in slices.items()
        }
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        # RuntimeError: there is no room to map the file.
        raise ModelFileError(path, [f"cannot be read ({error})"]) from error
    changed = [name for name, stored in files.stored.items() if opened[name] != stored]
    if changed:
        problems = [f"{name}: not what it was when its header was checked" for name in changed]
        raise ModelFileError(path, problems)
    tables = {name for name, spec in schema.items() if spec.storage is Storage.FP8_ROWS}
    return _StoredTensors(files.holders, readers, tables | {scale_name(name) for name in tables})


class _StoredTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, read anew at each access; those of `mapped` are not copied."""

    def __init__(
        self, holders: Mapping[str, str], readers: Mapping[str, Any], mapped: set[str]
    ) -> None:
        self._holders = holders
        self._readers = readers
        self._mapped = mapped

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._readers[self._holders[name]].get_tensor(name)
        return tensor if name in self._mapped else tensor.clone()

    def __contains__(self, name: object) -> bool:
        # What the base class does is to read the tensor.
        return name in self._holders

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)
