"""Which model token ids are of, as far as it can be told without reading the weights.

A client that makes ids of text and the worker that gets them must agree on it. Whether a cache or a
hand-over fits is another question, which the whole namespace of the blocks answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvstore.key import Namespace

SHOWN_CHARACTERS_MAX = 100
DIGEST_CHARACTERS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Equal for two copies of one model, wherever they lie."""

    name: str
    """As in the namespace of the model's blocks."""
    tokenizer: str
    """The same: the hash of all that makes ids of text."""
    source: str = field(compare=False)
    """What people call it: its file or folder, without where that lies."""

    def describe(self) -> str:
        """For a person, who is to see the difference from another one."""
        kind, _, digest = self.tokenizer.partition(":")
        shown = digest[:DIGEST_CHARACTERS_SHOWN] if digest else kind
        return f"{_cut(self.source)} ({_cut(self.name)}, tokenizer {_cut(shown)})"

    def to_document(self) -> dict[str, str]:
        """For the status document of a worker."""
        return asdict(self)


def identity_of(namespace: Namespace, path: str | Path) -> ModelIdentity:
    """Of a model that lies at a path, and whose blocks are in that namespace."""
    return ModelIdentity(
        name=namespace.model, tokenizer=namespace.tokenizer, source=source_of(path)
    )


def source_of(path: str | Path) -> str:
    """What people call a model that lies there."""
    return Path(path).absolute().name


def read_identity(said: object) -> ModelIdentity | None:
    """What a worker says of its model; None if it does not say it."""
    fields: Mapping[str, Any] = said if isinstance(said, dict) else {}
    known = {name: fields.get(name) for name in ("name", "tokenizer", "source")}
    texts = {name: value for name, value in known.items() if isinstance(value, str)}
    return ModelIdentity(**texts) if len(texts) == len(known) else None


def _cut(text: str) -> str:
    """Short, and on one line: a worker has said it."""
    return "".join(one if one.isprintable() else "?" for one in text[:SHOWN_CHARACTERS_MAX])
