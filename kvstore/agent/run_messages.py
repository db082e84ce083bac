"""What agents say to each other about runs that are offered: bodies of RUN and TAKE.

Pure: values in, bytes out, and back; the bytes stand in docs/formats/wire.md. Frames are cut by
`kvstore.wire`, and what is on offer is the business of `offers`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from .. import wire
from ..errors import InvalidArgument
from .offers import OfferedRun

PIECE_BYTES_MAX = 4 << 20
"""Of one RUN. To hash so much is the longest that it holds an agent's one thread, 1 ms or less;
smaller pieces make a transfer slower (docs/decisions/0033)."""
_CHECKSUM = struct.Struct("<Q")


class RunPiece(NamedTuple):
    """Bytes [start, start + bytes) of a run's sections, which lie one after the other."""

    run: OfferedRun
    start: int
    bytes: int


def pack_take(run: OfferedRun) -> bytes:
    """Body of TAKE."""
    return np.array([(*run, 0)], wire.OFFERED_RUN).tobytes()


def parse_take(body: bytes) -> OfferedRun:
    """Body of TAKE, its length being right."""
    *fields, _ = np.frombuffer(body, wire.OFFERED_RUN, 1)[0].tolist()
    return OfferedRun._make(fields)


def pack_piece(piece: RunPiece) -> bytes:
    """Body of RUN."""
    return np.array([(*piece.run, piece.bytes, piece.start)], wire.RUN_PIECE).tobytes()


def parse_piece(body: bytes) -> RunPiece:
    """Body of RUN, its length being right. Raises InvalidArgument for more than one may ask."""
    *fields, length, start = np.frombuffer(body, wire.RUN_PIECE, 1)[0].tolist()
    if not 1 <= length <= PIECE_BYTES_MAX:
        raise InvalidArgument("bytes of a run", given=length, expected=f"1 to {PIECE_BYTES_MAX}")
    return RunPiece(OfferedRun._make(fields), start, length)


def pack_checksum(xxh3: int) -> bytes:
    """Body of the answer to RUN: xxh3-64 of the payload."""
    return _CHECKSUM.pack(xxh3)


def parse_checksum(body: bytes) -> int:
    """Body of the answer to RUN; FrameError if it is none."""
    if len(body) != _CHECKSUM.size:
        raise wire.FrameError(f"RUN answer of {len(body)} bytes, expected {_CHECKSUM.size}")
    (xxh3,) = _CHECKSUM.unpack(body)
    return int(xxh3)
