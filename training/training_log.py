"""The log of a training run: JSON lines, one a record, that a later reader takes as they are.

{"part": "target", "kind": "step", "step": 100, "elapsed_s": 9.1, "tokens": 3276800, "loss": ..}
{"part": "target", "kind": "validation", .., "bits_per_byte": ..}
{"part": "run", "kind": "settings", ..}
"""

import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .command import InvalidInput, reading

Record = dict[str, Any]
Scalar = str | int | float
LINE_BYTES_MAX = 1 << 16
NUMBER_MAX = 1e100


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
    """Records in the order they were written; raises InvalidInput with the line that is none."""
    with reading("log", path, expected="the log.jsonl of a run"):
        file = path.open("rb")
    with file:
        for number, line in enumerate(iter(partial(file.readline, LINE_BYTES_MAX), b""), 1):
            with reading(f"line {number} of log", path, expected="a JSON object"):
                record = json.loads(line)
            if not _is_record(record):
                raise InvalidInput(
                    f"line {number} of log {path}",
                    given="no record",
                    expected="part and kind, texts and finite numbers, elapsed_s of every step",
                )
            yield record


def is_number(value: object) -> bool:
    """Whether it is finite, and small enough for a picture."""
    return isinstance(value, int | float) and abs(value) < NUMBER_MAX


def _is_record(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    is_timed = "step" not in value or (
        isinstance(value["step"], int)
        and is_number(value.get("elapsed_s"))
        and value["elapsed_s"] >= 0
    )
    is_named = isinstance(value.get("part"), str) and isinstance(value.get("kind"), str)
    are_scalars = all(isinstance(item, str) or is_number(item) for item in value.values())
    return is_timed and is_named and are_scalars


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
