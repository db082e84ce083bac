"""How the bytes of one KV block are cut: ordered sections, padding and shard sizes.

A layout says how long each part of a block is and in which order the parts stand. It says nothing
about what the bytes mean, nor where they are stored: the fingerprint goes into the namespace, so
blocks of two layouts never share a key.
"""

import hashlib
import json
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import InvalidArgument

BLOCK_TOKENS = 128
"""Tokens of one block. Keys, hits and window anchors are multiples of it; part of the format."""

BLOCK_BYTES_MIN = 1 << 10
BLOCK_BYTES_MAX = 16 << 20
SECTIONS_MAX = 1024
SECTION_NAME_BYTES_MAX = 64
SHARD_ALIGN_BYTES = 64
"""Every shard is a multiple of a cache line, the step of the vector code that encodes it."""

SHARDS_MAX = 32
"""Data and parity shards of a block, together; what the erasure code allows (erasure.code)."""


@dataclass(frozen=True, slots=True)
class Section:
    """One named run of bytes inside a block, usually the share of one layer.

    Raises InvalidArgument for an empty or too long name and for a size that is not a whole
    number from 1 to 16 MiB.
    """

    name: str
    bytes: int

    def __post_init__(self) -> None:
        encoded_bytes = _utf8_bytes(self.name) if isinstance(self.name, str) else 0
        if not 1 <= encoded_bytes <= SECTION_NAME_BYTES_MAX:
            raise InvalidArgument(
                what="section name",
                given=repr(self.name)[:120],
                expected=f"a name of 1 to {SECTION_NAME_BYTES_MAX} bytes of UTF-8",
            )
        size = whole_number(self.bytes)
        if size is None or not 1 <= size <= BLOCK_BYTES_MAX:
            raise InvalidArgument(
                what=f"bytes of section {self.name!r}",
                given=self.bytes,
                expected=f"a whole number from 1 to {BLOCK_BYTES_MAX}",
            )
        object.__setattr__(self, "bytes", size)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Ordered sections of one block of 128 tokens; equal layouts have equal fingerprints.

    `fingerprint` is 32 bytes, the sha256 of the canonical JSON (docs/formats/keys.md). Raises
    InvalidArgument if there is no section, if two have one name, or if the block is not 1 KiB to
    16 MiB long.
    """

    sections: tuple[Section, ...]
    block_bytes: int = field(init=False, compare=False)
    fingerprint: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sections = _checked_sections(self.sections)
        block_bytes = sum(section.bytes for section in sections)
        if not BLOCK_BYTES_MIN <= block_bytes <= BLOCK_BYTES_MAX:
            raise InvalidArgument(
                what="block bytes (sum of the sections)",
                given=block_bytes,
                expected=f"{BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX}",
            )
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "block_bytes", block_bytes)
        object.__setattr__(self, "fingerprint", _fingerprint(sections))


def padded_bytes(block_bytes: int, k: int) -> int:
    """Length of a block once it is padded to a multiple of `k` x 64 bytes."""
    size = whole_number(block_bytes)
    if size is None or not 1 <= size <= BLOCK_BYTES_MAX:
        raise InvalidArgument(
            what="block bytes",
            given=block_bytes,
            expected=f"a whole number from 1 to {BLOCK_BYTES_MAX}",
        )
    shards = whole_number(k)
    if shards is None or not 1 <= shards <= SHARDS_MAX:
        raise InvalidArgument(
            what="data shards k", given=k, expected=f"a whole number from 1 to {SHARDS_MAX}"
        )
    step = shards * SHARD_ALIGN_BYTES
    return -(-size // step) * step


def shard_bytes(block_bytes: int, k: int) -> int:
    """Length of one of the `k` data shards of a block: its padded length / k."""
    return padded_bytes(block_bytes, k) // k


def _checked_sections(given: Iterable[Section]) -> tuple[Section, ...]:
    try:
        sections = tuple(given)
    except TypeError:
        sections = ()
    if not sections or not all(isinstance(section, Section) for section in sections):
        raise InvalidArgument(
            what="sections of a layout",
            given=repr(given)[:120],
            expected="one or more Section objects",
        )
    if len(sections) > SECTIONS_MAX:
        raise InvalidArgument(
            what="number of sections", given=len(sections), expected=f"at most {SECTIONS_MAX}"
        )
    names = Counter(section.name for section in sections)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        raise InvalidArgument(
            what="section names", given=twice, expected="each name once in a layout"
        )
    return sections


def _fingerprint(sections: tuple[Section, ...]) -> bytes:
    rows = [{"bytes": section.bytes, "name": section.name} for section in sections]
    text = json.dumps({"sections": rows}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).digest()


def _utf8_bytes(name: str) -> int:
    """Length in UTF-8, or 0 if the text (a lone surrogate) has no UTF-8 form."""
    try:
        return len(name.encode())
    except UnicodeEncodeError:
        return 0


def whole_number(value: object) -> int | None:
    """The value as int; None if it is a bool, a float or anything else without __index__."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
