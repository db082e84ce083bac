"""The log of a training run: JSON lines, one a record, that a later reader takes as they are.

{"part": "target", "kind": "step", "step": 100, "elapsed_s": 9.1, "tokens": 3276800, "loss": ..}
{"part": "target", "kind": "validation", .., "bits_per_byte": ..}
{"part": "run", "kind": "settings", ..}
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Scalar = str | int | float


class TrainingLog:
    """Appends to a file, and tells the terminal in short."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, part: str, kind: str, **values: Scalar) -> None:
        record = {"part": part, "kind": kind, **values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(_shorten(record), file=sys.stderr, flush=True)


def read_log(path: Path) -> Iterator[Record]:
    """Records in the order they were written."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def drop_superseded(records: Iterable[Record]) -> list[Record]:
    """Without the steps that a run had logged but lost, and took again when it went on.

    State is saved less often than steps are logged.
    """
    kept = []
    first_later: dict[tuple[str, str], int] = {}
    for record in reversed(list(records)):
        series = (record["part"], record["kind"])
        if "step" in record:
            if record["step"] >= first_later.get(series, record["step"] + 1):
                continue
            first_later[series] = record["step"]
        kept.append(record)
    return kept[::-1]


def _shorten(record: Record) -> str:
    shown = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in record.items()
        if name not in ("part", "kind")
    )
    return f"{record['part']} {record['kind']}: " + ", ".join(shown)
