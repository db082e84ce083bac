"""A segment: one preallocated file of slots of one size, and what memory knows of each slot.

First come the headers of all slots, then all payloads without gaps, so that the shards of
neighbouring slots are one range of bytes.

The byte layout stands in docs/formats/slot.md. A segment does not know which slots are free or
which keys are current; that is for `space` and `target`. The functions with a `disk` argument block
and may run in any thread; the rest belongs to the event loop.
"""

from __future__ import annotations

import enum
import logging
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from ..key import KEY_BYTES
from ..wire import KEYS_PER_REQUEST_MAX, PART_RECORD
from .disk import Disk
from .page_probe import PageProbe
from .slot import FORMAT_VERSION, HEADER_BYTES, SlotGeometry

log = logging.getLogger(__name__)

SEGMENT_MAGIC = b"CACHSEGM"
HEADERS_OFFSET = 4096
PAYLOAD_ALIGN = 4096
"""Payloads begin on a page of their own, so that no page holds headers and payloads."""
LOCATION_BITS = 24
"""A location is segment number << 24 | slot."""
SLOT_MASK = (1 << LOCATION_BITS) - 1
ABSENT = -1
"""The location of a key that is not here."""
SLOTS_PER_SEGMENT_MAX = (1 << LOCATION_BITS) - 1
"""One less than would fit, so that the last slot of a segment never touches the next segment."""
TEMPORARY_SUFFIX = ".tmp"

_HEADER = struct.Struct("<8sIIIIII16s32s")
_CHECK = struct.Struct("<Q")
_NAME = re.compile(r"segment-(\d{6,})\.seg")
HEADERS_PER_CLEAR_MAX = 1024
_ALL_INDEXED = b"\1" * KEYS_PER_REQUEST_MAX
FREE_HEADERS = memoryview(bytes(HEADERS_PER_CLEAR_MAX * HEADER_BYTES))


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Whose a folder is: the cluster's id of 16 bytes and the target's name."""

    cluster: bytes
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShape:
    """Number and size of a segment."""

    number: int
    geometry: SlotGeometry
    slot_count: int

    @property
    def payload_offset(self) -> int:
        """Where in the file the payload of slot 0 begins."""
        headers_end = HEADERS_OFFSET + self.slot_count * HEADER_BYTES
        return -(-headers_end // PAYLOAD_ALIGN) * PAYLOAD_ALIGN

    @property
    def file_bytes(self) -> int:
        return self.payload_offset + self.slot_count * self.geometry.payload_bytes

    @property
    def first_location(self) -> int:
        return self.number << LOCATION_BITS

    @property
    def file_name(self) -> str:
        return f"segment-{self.number:06d}.seg"


class ReadWay(enum.Enum):
    """How shards get from a file to a peer without holding up the event loop."""

    PROBE = enum.auto()
    """Send from the file what is in memory; a thread reads the rest into a buffer."""
    DIRECT = enum.auto()
    """Send from the file: all of it is in memory."""
    THREAD = enum.auto()
    """A thread reads all: the file cannot be sent from, or nobody says what is in memory."""


class SlotColumns:
    """What is known of each slot of a segment, one array a fact; rows of free slots mean nothing.

    `status[slot]` is 1 exactly where the index has an entry that points to the slot. `parts`, of
    dtype wire.PART_RECORD, is what a READ answers, ready to be sent; `part_bytes` is the same
    memory, and `status`, `generation`, `payload_xxh3`, `block_xxh3` and `shard` are columns of it.
    `key_words` has four little-endian words a key, `key_bytes` is the same memory.
    `created_ds` is the time of writing in tenths of a second, of which 32 bits are kept: enough for
    the age of what was written lately. 77 bytes a slot in all.
    """

    __slots__ = (
        "block_index",
        "block_xxh3",
        "created_ds",
        "generation",
        "key_bytes",
        "key_words",
        "last_used_s",
        "part_bytes",
        "parts",
        "payload_xxh3",
        "shard",
        "status",
        "ttl_class",
    )

    def __init__(self, slot_count: int) -> None:
        self.key_words = np.zeros((slot_count, KEY_BYTES // 8), np.uint64)
        self.key_bytes = self.key_words.reshape(-1).view(np.uint8).data
        self.parts = np.zeros(slot_count, PART_RECORD)
        self.part_bytes = self.parts.view(np.uint8).data
        self.status = self.parts["status"]
        self.generation = self.parts["generation"]
        self.payload_xxh3 = self.parts["payload_xxh3"]
        self.block_xxh3 = self.parts["block_xxh3"]
        self.shard = self.parts["shard"]
        self.created_ds = np.zeros(slot_count, np.uint32)
        self.last_used_s = np.zeros(slot_count, np.uint32)
        self.block_index = np.zeros(slot_count, np.uint32)
        self.ttl_class = np.zeros(slot_count, np.uint8)

    def key_at(self, slot: int) -> bytes:
        """The key of a slot that is in the index."""
        return self.key_bytes[slot * KEY_BYTES : (slot + 1) * KEY_BYTES].tobytes()

    def are_indexed(self, first_slot: int, count: int) -> bool:
        """Whether the index points to each of these neighbouring slots."""
        return self._statuses(first_slot, count) == _ALL_INDEXED[:count]

    def has_indexed(self, first_slot: int, count: int) -> bool:
        """Whether the index points to any of these neighbouring slots."""
        return b"\1" in self._statuses(first_slot, count)

    def _statuses(self, first_slot: int, count: int) -> bytes:
        record_bytes = PART_RECORD.itemsize
        end = (first_slot + count) * record_bytes
        return self.part_bytes[first_slot * record_bytes : end : record_bytes].tobytes()


class Segment:
    """An open segment file. `pins` counts those who read it; a pinned segment stays open.

    `is_suspect`: sending from the file failed once. Threads read it from then on, because they can
    tell good shards from bad ones, and a frame that is being sent from a file cannot be mended.
    With ReadWay.PROBE there is a `probe`, and only then.
    """

    __slots__ = (
        "columns",
        "descriptor",
        "is_dirty",
        "is_suspect",
        "path",
        "payload_bytes",
        "payload_offset",
        "pins",
        "probe",
        "read_way",
        "shape",
    )

    def __init__(
        self,
        shape: SegmentShape,
        path: Path,
        descriptor: int,
        read_way: ReadWay,
        probe: PageProbe | None = None,
    ) -> None:
        assert (probe is not None) == (read_way is ReadWay.PROBE)
        self.shape = shape
        self.path = path
        self.descriptor = descriptor
        self.read_way = read_way
        self.probe = probe
        self.payload_bytes = shape.geometry.payload_bytes
        self.payload_offset = shape.payload_offset
        self.columns = SlotColumns(shape.slot_count)
        self.pins = 0
        self.is_dirty = False
        self.is_suspect = False

    def offset(self, slot: int) -> int:
        """First byte of a slot's payload in the file."""
        assert 0 <= slot < self.shape.slot_count
        return self.payload_offset + slot * self.payload_bytes

    def header_offset(self, slot: int) -> int:
        """First byte of a slot's header in the file."""
        assert 0 <= slot < self.shape.slot_count
        return HEADERS_OFFSET + slot * HEADER_BYTES

    def can_send(self, disk: Disk, first_slot: int, count: int) -> bool:
        """Whether the payloads of neighbouring slots can be sent from the file without waiting."""
        if self.is_suspect:
            return False
        if self.probe is None:
            return self.read_way is ReadWay.DIRECT
        size_bytes = count * self.payload_bytes
        return disk.is_cached(self.probe, self.offset(first_slot), size_bytes)

    def write_slots(
        self, disk: Disk, first_slot: int, payloads: Sequence[memoryview], headers: memoryview
    ) -> None:
        """Write neighbouring slots from `first_slot` on, the payloads first; blocks."""
        disk.write(self.descriptor, payloads, self.offset(first_slot))
        disk.write(self.descriptor, [headers], self.header_offset(first_slot))

    def clear_headers(self, disk: Disk, first_slot: int, count: int) -> None:
        """Write zeros over the headers of neighbouring slots; blocks. OSError if that fails."""
        for at in range(first_slot, first_slot + count, HEADERS_PER_CLEAR_MAX):
            cleared = min(first_slot + count - at, HEADERS_PER_CLEAR_MAX)
            view = FREE_HEADERS[: cleared * HEADER_BYTES]
            disk.write(self.descriptor, [view], self.header_offset(at))

    def close(self, disk: Disk) -> None:
        """Close the file. Nobody may use the segment afterwards."""
        if self.probe is not None:
            self.probe.close()
        disk.close(self.descriptor)


def create_segment(
    disk: Disk, folder: Path, identity: TargetIdentity, shape: SegmentShape
) -> Segment:
    """Make a segment file that appears under its name only when it is complete; blocks.

    Raises OSError, and leaves no file behind, if the disk has no room or fails.
    """
    path = folder / shape.file_name
    temporary = folder / (shape.file_name + TEMPORARY_SUFFIX)
    descriptor = disk.create(temporary)
    written_as = temporary
    try:
        disk.allocate(descriptor, shape.file_bytes)
        disk.write(descriptor, [memoryview(pack_segment_header(shape, identity))], 0)
        disk.sync(descriptor)
        disk.rename(temporary, path)
        written_as = path
        disk.sync_folder(folder)
        return Segment(shape, path, descriptor, *choose_read_way(disk, descriptor))
    except OSError:
        disk.close(descriptor)
        try:
            disk.remove(written_as)
        except OSError as error:
            log.error("cannot remove the unfinished %s: %s", written_as, error)
        raise


class SegmentCut(ValueError):
    """A segment file is shorter than its header says; `shape` is None if not even that is there."""

    def __init__(self, path: Path, size_bytes: int, shape: SegmentShape | None) -> None:
        expected = HEADERS_OFFSET if shape is None else shape.file_bytes
        super().__init__(f"is {size_bytes} bytes long, expected {expected}")
        self.path = path
        self.size_bytes = size_bytes
        self.shape = shape


def open_segment(
    disk: Disk, path: Path, identity: TargetIdentity, *, may_be_short: bool = False
) -> Segment:
    """Open an existing segment file; blocks.

    Raises ValueError, which says what is wrong, if its name and header do not fit each other and
    the identity; SegmentCut, which is one, if it is too short; OSError if it cannot be read.
    """
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ValueError("is not named segment-NNNNNN.seg")
    descriptor = disk.open(path)
    try:
        size_bytes = disk.size(descriptor)
        head = bytearray(_HEADER.size + _CHECK.size)
        if size_bytes < len(head):
            raise SegmentCut(path, size_bytes, None)
        disk.read(descriptor, memoryview(head), 0)
        shape = parse_segment_header(bytes(head), identity)
        if shape.number != int(name[1]):
            raise ValueError(f"its header says it is segment {shape.number}")
        if size_bytes < shape.file_bytes and not may_be_short:
            raise SegmentCut(path, size_bytes, shape)
        return Segment(shape, path, descriptor, *choose_read_way(disk, descriptor))
    except (ValueError, OSError):
        disk.close(descriptor)
        raise


def find_segment_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Paths of the segments in a folder in the order of their numbers, and of unfinished ones."""
    paths = sorted(folder.glob("segment-*.seg"), key=lambda path: (len(path.name), path.name))
    return paths, sorted(folder.glob(f"segment-*.seg{TEMPORARY_SUFFIX}"))


def choose_read_way(disk: Disk, descriptor: int) -> tuple[ReadWay, PageProbe | None]:
    """Decide once a file, by trying it, how its shards get to a peer."""
    if not disk.can_send(descriptor):
        return ReadWay.THREAD, None
    if disk.is_in_memory(descriptor):
        return ReadWay.DIRECT, None
    probe = disk.probe_pages(descriptor)
    return (ReadWay.THREAD if probe is None else ReadWay.PROBE), probe


def pack_segment_header(shape: SegmentShape, identity: TargetIdentity) -> bytes:
    """The first 88 bytes of a segment file."""
    head = _HEADER.pack(
        SEGMENT_MAGIC,
        FORMAT_VERSION,
        shape.number,
        shape.geometry.payload_bytes,
        HEADER_BYTES,
        shape.slot_count,
        0,
        identity.cluster,
        identity.name.encode(),
    )
    return head + _CHECK.pack(xxh3_64_intdigest(head))


def parse_segment_header(data: bytes, identity: TargetIdentity) -> SegmentShape:
    """The shape in a segment's first 88 bytes; ValueError if they do not fit `identity`."""
    magic, version, number, payload_bytes, header_bytes, slot_count, _, cluster, name = (
        _HEADER.unpack_from(data)
    )
    if magic != SEGMENT_MAGIC:
        raise ValueError(f"its magic is {magic!r}, expected {SEGMENT_MAGIC!r}")
    if version != FORMAT_VERSION:
        raise ValueError(f"its format version is {version}, expected {FORMAT_VERSION}")
    check = _CHECK.unpack_from(data, _HEADER.size)[0]
    computed = xxh3_64_intdigest(data[: _HEADER.size])
    if check != computed:
        raise ValueError(f"its header checksum is {check:016x}, computed {computed:016x}")
    if cluster != identity.cluster:
        raise ValueError(f"its cluster is {cluster.hex()}, expected {identity.cluster.hex()}")
    if name.rstrip(b"\0") != identity.name.encode():
        raise ValueError(f"its target is {name!r}, expected {identity.name!r}")
    geometry = SlotGeometry(payload_bytes)
    if header_bytes != HEADER_BYTES or not 0 < slot_count <= SLOTS_PER_SEGMENT_MAX:
        raise ValueError(f"{slot_count} slots with headers of {header_bytes} bytes")
    return SegmentShape(number=number, geometry=geometry, slot_count=slot_count)
