"""Reads GGUF files: metadata, dequantised tensors and the hash of the contents.

What the metadata and the tensors of one architecture have to be is decided beside that
architecture; here is only what every GGUF file has. The file is trusted not to be hostile: a model
is chosen by the operator, never by a client.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
import torch

from ..errors import MissingModel, ModelFileError

T = TypeVar("T")


@dataclass(kw_only=True)
class GgufFile:
    """An open GGUF file. `problems` collects what readers of it find wrong.

    `tensor_shapes` are in torch order (rows first), which is GGUF's order reversed.
    """

    path: Path
    metadata: dict[str, object]
    tensor_shapes: dict[str, tuple[int, ...]]
    problems: list[str] = field(default_factory=list)
    _tensors: dict[str, gguf.ReaderTensor]

    @classmethod
    def open(cls, path: str | Path) -> "GgufFile":
        """Read metadata and the table of tensors; weights stay on disk until asked for.

        Raises MissingModel if there is no file, ModelFileError if it is no sound GGUF file.
        """
        path = Path(path)
        if not path.is_file():
            is_there = path.exists()
            raise MissingModel(
                path,
                "it is no regular file and no folder" if is_there else "there is no such file",
            )
        try:
            reader = gguf.GGUFReader(path)
            metadata = {name: entry.contents() for name, entry in reader.fields.items()}
        except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
            # The reader has no errors of its own: cut-off and foreign files surface as these.
            raise ModelFileError(path, [f"not a readable GGUF file ({error})"]) from error
        except OSError as error:
            raise ModelFileError(path, [f"it cannot be read: {error.strerror or error}"]) from error
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {
            name: tuple(reversed([int(size) for size in tensor.shape]))
            for name, tensor in tensors.items()
        }
        return cls(path=path, metadata=metadata, tensor_shapes=shapes, _tensors=tensors)

    def read(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Metadata value of type `kind`; `kind()` if it is of another type or, without a default,
        missing, which is noted.
        """
        value = self.metadata.get(key, default)
        if value is None:
            self.problems.append(f"metadata {key} is missing")
            return kind()
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.problems.append(f"metadata {key}: given {value!r:.60}, expected {kind.__name__}")
            return kind()
        return value

    def check_tensors(
        self, expected: dict[str, tuple[int, ...]], optional: frozenset[str] = frozenset()
    ) -> None:
        """Note every tensor that is missing, has another shape, or is not known.

        A tensor nobody reads would mean an answer computed without it, so it is a problem too.
        """
        for name, shape in expected.items():
            found = self.tensor_shapes.get(name)
            if found is None:
                if name not in optional:
                    self.problems.append(f"tensor {name} is missing, expected shape {shape}")
            elif found != shape:
                self.problems.append(f"tensor {name}: given shape {found}, expected {shape}")
        unknown = sorted(self.tensor_shapes.keys() - expected.keys())
        self.problems += [f"tensor {name} is not known to this architecture" for name in unknown]

    def raise_problems(self) -> None:
        """Raise ModelFileError with everything noted so far, if there is anything."""
        if self.problems:
            raise ModelFileError(self.path, self.problems)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor dequantised to float32, a copy of its own; raises KeyError if it is absent."""
        entry = self._tensors[name]
        values = gguf.quants.dequantize(entry.data, entry.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def content_sha256(self) -> str:
        """Hex sha256 of the whole file: the only honest name of a weights revision."""
        with self.path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
