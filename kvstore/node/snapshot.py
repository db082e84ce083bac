"""The index of a target in one file, written at a clean stop and taken at the next start.

It saves reading and checking the headers of all slots. It is not a log and not the truth: whoever
starts takes the file out of the folder first, so what is written later can never meet an old one,
and where it is missing or does not fit in any way the headers are read instead. The layout stands
in docs/formats/snapshot.md.

pyarrow is loaded only here and only when it is needed: it takes 0.1 s and 40 MB, so that targets
with few shards are better off without a snapshot (`TargetSettings.snapshot_shards_min`).
"""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from ..key import KEY_BYTES
from ..wire import PART_RECORD
from .disk import Disk
from .segment import TEMPORARY_SUFFIX, Segment, TargetIdentity
from .slot import FORMAT_VERSION

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

log = logging.getLogger(__name__)

SNAPSHOT_FORMAT = 1
METADATA_KEY = b"cachalot"
QUARANTINED = 2
"""The status, in a snapshot only, of a slot that is out of use."""
READ_BYTES = 1 << 20
TABLE_ROWS_MAX = 1 << 20
NUMBER_COLUMNS = {
    "last_used_s": np.uint32,
    "block_index": np.uint32,
    "created_ds": np.uint32,
    "ttl_class": np.uint8,
}
_NAME = re.compile(r"index-([0-9a-f]{16})\.arrow")
_PATTERN = "index-*.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHead:
    """What a snapshot says besides its columns."""

    cluster: str
    target: str
    segments: list[list[int]]
    """Number, payload_bytes, slot_count of each, and its number in the table, in the order of the
    batches."""
    shards: int
    """Entries of the index."""
    last_generation: int
    ttl_classes: list[str]
    """Names by number; Latin-1, so that any byte is kept."""
    table_seed: int
    table_keys_max: int
    format: int = SNAPSHOT_FORMAT
    slot_format: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that was read. `table` and the columns lie in memory that ends with `open`."""

    head: SnapshotHead
    batches: list[pa.RecordBatch]
    table: list[NDArray[np.uint64]]

    def fill(self, segment: Segment, position: int) -> NDArray[np.int64]:
        """Fill a segment's columns from the batch at `position`; returns quarantined slots."""
        columns, batch = segment.columns, self.batches[position]
        columns.key_bytes[:] = _bytes_of(batch.column("key"))
        columns.part_bytes[:] = _bytes_of(batch.column("part"))
        for name in NUMBER_COLUMNS:
            getattr(columns, name)[:] = batch.column(name).to_numpy()
        quarantined = np.flatnonzero(columns.status == QUARANTINED)
        columns.status[quarantined] = 0
        return quarantined


class SnapshotUnfit(ValueError):
    """A snapshot is damaged, or of another time or target; says why."""


def load_pyarrow() -> ModuleType:
    """pyarrow, which is loaded by the first who needs it."""
    return importlib.import_module("pyarrow")


# Writing --------------------------------------------------------------------------------------


def write_snapshot(
    disk: Disk,
    folder: Path,
    head: SnapshotHead,
    segments: list[Segment],
    table: NDArray[np.uint64],
) -> Path:
    """Write a snapshot of `segments`, in the order of `head.segments`; blocks.

    The file appears under its name, which has its checksum, when it is complete. Not synced: after
    a power cut the checksum tells. Raises OSError, and leaves no file behind.
    """
    temporary = folder / f"index.arrow{TEMPORARY_SUFFIX}"
    remove_if_there(disk, temporary)
    descriptor = disk.create(temporary)
    try:
        sink = _Sink(disk, descriptor)
        _write_streams(sink, head, segments, table)
        path = folder / f"index-{sink.digest.hexdigest()}.arrow"
        disk.rename(temporary, path)
    except OSError:
        remove_if_there(disk, temporary)
        raise
    finally:
        disk.close(descriptor)
    return path


class _Sink:
    """What pyarrow writes to: a file of the disk, and its checksum."""

    def __init__(self, disk: Disk, descriptor: int) -> None:
        self.digest = xxh3_64()
        self.closed = False
        self._disk = disk
        self._descriptor = descriptor
        self._offset = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        self._disk.write(self._descriptor, [view], self._offset)
        self.digest.update(view)
        self._offset += len(view)
        return len(view)

    def tell(self) -> int:
        return self._offset

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.closed = True


def _write_streams(
    sink: _Sink, head: SnapshotHead, segments: list[Segment], table: NDArray[np.uint64]
) -> None:
    metadata = {METADATA_KEY: json.dumps(asdict(head)).encode()}
    pa = load_pyarrow()
    wide = [("key", pa.binary(KEY_BYTES)), ("part", pa.binary(PART_RECORD.itemsize))]
    narrow = [(name, pa.from_numpy_dtype(dtype)) for name, dtype in NUMBER_COLUMNS.items()]
    slots_schema = pa.schema([*wide, *narrow], metadata)
    with pa.PythonFile(sink, mode="w") as file:
        with pa.ipc.new_stream(file, slots_schema) as writer:
            for segment in segments:
                writer.write_batch(_make_batch(segment, slots_schema))
        with pa.ipc.new_stream(file, pa.schema([("word", pa.uint64())])) as writer:
            for at in range(0, len(table), TABLE_ROWS_MAX):
                words = pa.array(table[at : at + TABLE_ROWS_MAX])
                writer.write_batch(pa.record_batch([words], ["word"]))


def _make_batch(segment: Segment, schema: pa.Schema) -> pa.RecordBatch:
    pa = load_pyarrow()
    columns, count = segment.columns, segment.shape.slot_count
    wide = [
        pa.Array.from_buffers(schema.field(name).type, count, [None, pa.py_buffer(data)])
        for name, data in (("key", columns.key_bytes), ("part", columns.part_bytes))
    ]
    narrow = [pa.array(getattr(columns, name)) for name in NUMBER_COLUMNS]
    return pa.record_batch([*wide, *narrow], schema=schema)


# Reading --------------------------------------------------------------------------------------


@contextmanager
def take_snapshot(disk: Disk, folder: Path) -> Iterator[Snapshot | None]:
    """Take the snapshot out of the folder, if there is one, and read it; blocks.

    Its file has no name any more then, for good, so a process that is killed from here on leaves
    none. None, after the reason was logged, if it is damaged or cannot be read. Raises OSError if
    the file cannot be removed.
    """
    remove_if_there(disk, folder / f"index.arrow{TEMPORARY_SUFFIX}")
    paths = sorted(folder.glob(_PATTERN))
    if not paths:
        yield None
        return
    descriptor = -1
    try:
        descriptor = disk.open(paths[-1])
    except OSError as error:
        log.error("snapshot not used file=%s: %s", paths[-1], error)
    for path in paths:
        disk.remove(path)
    disk.sync_folder(folder)
    if descriptor < 0:
        yield None
        return
    try:
        with _mapped(disk, descriptor, paths[-1]) as data:
            yield None if data is None else _parse_or_log(data, paths[-1])
    finally:
        disk.close(descriptor)


@contextmanager
def _mapped(disk: Disk, descriptor: int, path: Path) -> Iterator[mmap.mmap | None]:
    """The file in memory, or None if its checksum is not that in its name.

    It is read before it is mapped: a device that fails must not show as SIGBUS.
    """
    try:
        _check_digest(disk, descriptor, path)
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    except (OSError, SnapshotUnfit) as error:
        log.error("snapshot not used file=%s: %s", path, error)
        yield None
        return
    try:
        yield mapped
    finally:
        try:
            mapped.close()
        except BufferError:
            # Somebody still looks at it, as an exception on its way does; it ends with them.
            log.debug("snapshot still mapped file=%s", path)


def _check_digest(disk: Disk, descriptor: int, path: Path) -> None:
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise SnapshotUnfit("is not named index-CHECKSUM.arrow")
    size_bytes, digest = disk.size(descriptor), xxh3_64()
    if not size_bytes:
        raise SnapshotUnfit("is empty")
    chunk = memoryview(bytearray(READ_BYTES))
    for offset in range(0, size_bytes, READ_BYTES):
        part = chunk[: min(READ_BYTES, size_bytes - offset)]
        disk.read(descriptor, part, offset)
        digest.update(part)
    if digest.hexdigest() != name[1]:
        raise SnapshotUnfit(f"its checksum is {digest.hexdigest()}")


def _parse_or_log(data: mmap.mmap, path: Path) -> Snapshot | None:
    try:
        return parse_snapshot(data)
    except SnapshotUnfit as error:
        log.error("snapshot not used file=%s: %s", path, error)
        return None


def parse_snapshot(data: mmap.mmap | bytes) -> Snapshot:
    """The snapshot in a buffer, which it goes on to use; SnapshotUnfit if there is none."""
    pa = load_pyarrow()
    try:
        with pa.BufferReader(pa.py_buffer(data)) as source:
            with pa.ipc.open_stream(source) as slots:
                head = _parse_head((slots.schema.metadata or {}).get(METADATA_KEY, b""))
                batches = list(slots)
            with pa.ipc.open_stream(source) as table:
                words = [batch.column("word").to_numpy() for batch in table]
    except (pa.ArrowException, KeyError, OSError) as error:
        raise SnapshotUnfit(f"is no snapshot: {error}") from error
    counts = [batch.num_rows for batch in batches]
    if counts != [slot_count for _, _, slot_count, _ in head.segments]:
        raise SnapshotUnfit(f"has batches of {counts[:8]} rows, expected those of its segments")
    return Snapshot(head, batches, words)


def _parse_head(content: bytes) -> SnapshotHead:
    try:
        found = json.loads(content)
        if (found["format"], found["slot_format"]) != (SNAPSHOT_FORMAT, FORMAT_VERSION):
            raise SnapshotUnfit(
                f"has format {found['format']} for slots of format {found['slot_format']},"
                f" expected {SNAPSHOT_FORMAT} and {FORMAT_VERSION}"
            )
        return SnapshotHead(**found)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, SnapshotUnfit):
            raise
        raise SnapshotUnfit(f"its head cannot be read: {error}") from error


def find_misfit(
    head: SnapshotHead, identity: TargetIdentity, segments: list[Segment]
) -> str | None:
    """Why a snapshot is not one of these segments, if it is not."""
    if (head.cluster, head.target) != (identity.cluster.hex(), identity.name):
        return f"is of target {head.target} of cluster {head.cluster}"
    found = [
        [s.shape.number, s.payload_bytes, s.shape.slot_count]
        for s in sorted(segments, key=lambda segment: segment.shape.number)
    ]
    if [one[:3] for one in head.segments] != found:
        return f"is of {len(head.segments)} segments, which are not the {len(found)} that are here"
    return None


def remove_if_there(disk: Disk, path: Path) -> None:
    """Remove a file; none is fine as well."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        return


def _bytes_of(array: pa.Array) -> memoryview:
    """The values of a fixed-size binary array without nulls."""
    width = array.type.byte_width
    start = array.offset * width
    return memoryview(array.buffers()[1]).cast("B")[start : start + len(array) * width]
