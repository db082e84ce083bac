"""Which files of a folder hold its tensors, and which tensor is in which file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ....errors import ModelFileError
from ..json_file import read_json
from .tensor_file import StoredTensor, TensorFile, read_tensor_file

INDEX_NAME = "model.safetensors.index.json"
INDEX_BYTES_MAX = 32 << 20
"""Three times that of V4.1-Flash, which names 100,000 tensors."""
WHOLE_NAME = "model.safetensors"
SHARD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")
SUFFIX = ".safetensors"


@dataclass(slots=True)
class CheckpointFiles:
    """`holders`: tensor -> the name of its file; `stored`: what its header says.

    `names`: all that are entered, sound or not. `is_complete`: whether every header could be read.
    """

    holders: dict[str, str] = field(default_factory=dict)
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    is_complete: bool = True
    problems: list[str] = field(default_factory=list)

    def add(self, file: TensorFile) -> None:
        self._note(file)
        for name, tensor in file.tensors.items():
            if name in self.holders:
                both = f"{self.holders[name]} and {file.path.name}"
                self.problems.append(f"tensor {name!r:.120} is in both {both}")
            self.holders[name], self.stored[name] = file.path.name, tensor

    def override(self, file: TensorFile) -> None:
        self._note(file)
        self.holders |= dict.fromkeys(file.tensors, file.path.name)
        self.stored |= file.tensors

    def _note(self, file: TensorFile) -> None:
        self.problems += file.problems
        self.names |= file.names
        self.is_complete &= file.is_readable

    def fail(self, problem: str) -> None:
        """Note a problem that leaves unknown what the checkpoint holds."""
        self.problems.append(problem)
        self.is_complete = False


def find_files(folder: Path, overriding: Sequence[str] = ()) -> CheckpointFiles:
    """Read the headers of all files that belong to a checkpoint, as other readers choose them.

    Those that the index names; without an index `model.safetensors` alone; without that all
    safetensors files. `overriding` files come last and replace tensors of the same name.
    """
    found = CheckpointFiles()
    listed = _list_files(folder, found)
    present = [name for name in listed if _is_tensor_file(name) and name not in overriding]
    if INDEX_NAME in listed:
        _add_indexed(folder, present, found)
    else:
        if WHOLE_NAME in present:
            extra = [name for name in present if SHARD_NAME.fullmatch(name)]
            found.problems += [f"{name}: a shard beside {WHOLE_NAME}" for name in extra]
            present = [WHOLE_NAME]
        if not present and not found.problems:
            found.fail(f"there is no {SUFFIX} file")
        _add_all(folder, present, found)
    for name in overriding:
        found.override(read_tensor_file(folder / name))
    return found


def _list_files(folder: Path, found: CheckpointFiles) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        found.fail(f"cannot be listed ({error})")
        return []


def _add_all(folder: Path, names: list[str], found: CheckpointFiles) -> None:
    """Read each file once: links let a single one take the work of thousands."""
    read: dict[object, str] = {}
    for name in names:
        first = read.setdefault(_identity(folder / name), name)
        if first == name:
            found.add(read_tensor_file(folder / name))
        else:
            found.fail(f"{name}: the same file as {first}")


def _identity(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        # It is told why when it is read.
        return path
    return status.st_dev, status.st_ino


def _add_indexed(folder: Path, present: list[str], found: CheckpointFiles) -> None:
    try:
        index = read_json(folder / INDEX_NAME, bytes_max=INDEX_BYTES_MAX)
    except ModelFileError as error:
        for problem in error.problems:
            found.fail(f"{INDEX_NAME}: {problem}")
        return
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        found.fail(f"{INDEX_NAME}: expected weight_map, from tensors to files")
        return
    named = set(places.values())
    for name in sorted(named):
        if not _is_plain_name(name):
            found.fail(f"{INDEX_NAME}: {name!r:.120} is no safetensors file here")
    _add_all(folder, sorted(filter(_is_plain_name, named)), found)
    for name in sorted(set(present) - named):
        found.problems.append(f"{name}: not named in {INDEX_NAME}")
    if found.is_complete:
        found.problems += _index_problems(places, found.holders)


def _is_tensor_file(name: str) -> bool:
    return name.endswith(SUFFIX) and not name.startswith(".")


def _is_plain_name(name: str) -> bool:
    return _is_tensor_file(name) and name.isprintable() and not re.search(r"[/\\]", name)


def _index_problems(places: dict[str, str], holders: dict[str, str]) -> list[str]:
    found = []
    for name in places.keys() | holders.keys():
        said, held = places.get(name, "no file"), holders.get(name, "no file")
        if said != held:
            found.append(f"{INDEX_NAME}: {name!r:.120} is said to be in {said}, is in {held}")
    return sorted(found)
