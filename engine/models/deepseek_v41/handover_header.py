"""The header of a hand-over: what it says, as bytes, and the check of bytes from elsewhere.

Offsets: docs/formats/v41-state.md. The body after it, and its checksum, are `handover`'s.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from kvstore.layout import BLOCK_TOKENS, BlockLayout

from ...errors import HandoverRefused
from .config import DeepseekV41Config
from .layout import StateOffsets, align_up, group_tokens, handover_layout, state_offsets
from .state import NO_ID, StateMarks, recent_count

MAGIC = b"CACHV41S"
VERSION = 1
MODEL_ID_BYTES = 32
HEADER_ALIGN_BYTES = 64

PREFIX = struct.Struct("<8sIIQQQ")
"""magic, version, header bytes, total bytes, xxh3 of the rest of the header, xxh3 of the body."""

FACTS = struct.Struct("<32s32s32sQQQQQII")
"""model id, fingerprints of state and block layout, length, length reached, least length, window
starts of encoder and decoder, number of rings, number of recent ids."""

RANGE = struct.Struct("<QQ")
ID = struct.Struct("<i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What sender and receiver must agree in: the sizes, how blocks lie, who made the numbers.

    `model_id` is 32 bytes that name the weights and the arithmetic.
    """

    config: DeepseekV41Config
    block_layout: BlockLayout
    model_id: bytes

    def __post_init__(self) -> None:
        assert len(self.model_id) == MODEL_ID_BYTES, len(self.model_id)


def body_bytes(identity: Identity, length: int) -> int:
    """The state slot and the blocks of `length` tokens."""
    blocks = -(-length // BLOCK_TOKENS)
    state_bytes = state_offsets(identity.config).state_bytes
    return state_bytes + blocks * identity.block_layout.block_bytes


def write_header(
    identity: Identity, marks: StateMarks, *, body_xxh3: int, has_blocks: bool = True
) -> bytes:
    """The header before a body of `body_bytes`; without blocks the body is the slot alone."""
    problem = next(mark_problems(identity.config, marks), None)
    assert problem is None, problem
    rest = b"".join(
        (
            FACTS.pack(
                identity.model_id,
                handover_layout(identity.config).fingerprint,
                identity.block_layout.fingerprint,
                marks.length,
                marks.length_reached,
                marks.length_min,
                marks.encoder_window_start,
                marks.decoder_window_start,
                len(marks.ring_ranges),
                len(marks.recent_ids),
            ),
            *(RANGE.pack(*ring) for ring in marks.ring_ranges),
            *(ID.pack(number) for number in marks.recent_ids),
        )
    )
    header_bytes = align_up(PREFIX.size + len(rest), HEADER_ALIGN_BYTES)
    rest = rest.ljust(header_bytes - PREFIX.size, b"\0")
    total_bytes = header_bytes + body_bytes(identity, marks.length if has_blocks else 0)
    rest_xxh3 = xxhash.xxh3_64_intdigest(rest)
    return PREFIX.pack(MAGIC, VERSION, header_bytes, total_bytes, rest_xxh3, body_xxh3) + rest


def read_header(
    data: memoryview, identity: Identity, slot: memoryview | None = None
) -> tuple[StateMarks, int]:
    """What a whole hand-over says, and the length of its header; the body is checked too.

    `data` is header and body. With `slot`, whose blocks travel by themselves, it is the header
    alone. Raises HandoverRefused that names the first part that is wrong.
    """
    given_bytes = len(data) + (0 if slot is None else len(slot))
    _expect("length in bytes", len(data), len(data) >= PREFIX.size + FACTS.size, "a header")
    magic, version, header_bytes, total_bytes, rest_xxh3, body_xxh3 = PREFIX.unpack_from(data)
    _expect("magic", magic, magic == MAGIC, MAGIC)
    _expect("version", version, version == VERSION, VERSION)
    _expect("length in bytes", given_bytes, given_bytes == total_bytes, total_bytes)
    is_whole = PREFIX.size + FACTS.size <= header_bytes <= len(data)
    _expect("header bytes", header_bytes, is_whole, f"{PREFIX.size + FACTS.size} to {len(data)}")
    found_xxh3 = xxhash.xxh3_64_intdigest(data[PREFIX.size : header_bytes])
    _expect("checksum of the header", found_xxh3, found_xxh3 == rest_xxh3, rest_xxh3)
    marks = _read_marks(data[PREFIX.size : header_bytes], identity)
    body = data[header_bytes:] if slot is None else slot
    expected_bytes = header_bytes + body_bytes(identity, marks.length if slot is None else 0)
    given_bytes = header_bytes + len(body)
    _expect("length in bytes", given_bytes, given_bytes == expected_bytes, expected_bytes)
    found_xxh3 = xxhash.xxh3_64_intdigest(body)
    _expect("checksum of the body", found_xxh3, found_xxh3 == body_xxh3, body_xxh3)
    return marks, header_bytes


def _read_marks(rest: memoryview, identity: Identity) -> StateMarks:
    (
        model_id,
        state_fingerprint,
        block_fingerprint,
        length,
        length_reached,
        length_min,
        encoder_window_start,
        decoder_window_start,
        rings,
        ids,
    ) = FACTS.unpack_from(rest)
    config = identity.config
    for what, given, expected in (
        ("model id", model_id.hex(), identity.model_id.hex()),
        ("state layout", state_fingerprint.hex(), handover_layout(config).fingerprint.hex()),
        ("number of rings", rings, _ring_count(state_offsets(config))),
        ("number of recent ids", ids, recent_count(config)),
    ):
        _expect(what, given, given == expected, expected)
    layout = identity.block_layout
    _expect(
        "block layout",
        block_fingerprint.hex(),
        block_fingerprint == layout.fingerprint,
        f"{layout.fingerprint.hex()}, {layout.block_bytes} bytes; pools both exact or both padded",
    )
    used_bytes = FACTS.size + rings * RANGE.size + ids * ID.size
    expected_bytes = align_up(PREFIX.size + used_bytes, HEADER_ALIGN_BYTES)
    header_bytes = PREFIX.size + len(rest)
    _expect("header bytes", header_bytes, header_bytes == expected_bytes, expected_bytes)
    padding = bytes(rest[used_bytes:])
    _expect("padding of the header", padding.hex(), not any(padding), "zeros")
    ranges_end = FACTS.size + rings * RANGE.size
    marks = StateMarks(
        length=length,
        length_reached=length_reached,
        length_min=length_min,
        encoder_window_start=encoder_window_start,
        decoder_window_start=decoder_window_start,
        ring_ranges=tuple(RANGE.iter_unpack(rest[FACTS.size : ranges_end])),
        recent_ids=tuple(number for (number,) in ID.iter_unpack(rest[ranges_end:used_bytes])),
    )
    for what, given, expected in mark_problems(config, marks):
        raise HandoverRefused(what, given=given, expected=expected)
    return marks


def _expect(what: str, given: object, is_right: bool, expected: object) -> None:
    if not is_right:
        raise HandoverRefused(what, given=given, expected=expected)


def _ring_count(offsets: StateOffsets) -> int:
    return len(offsets.rings) + len(offsets.compressors)


def mark_problems(
    config: DeepseekV41Config, marks: StateMarks
) -> Iterator[tuple[str, object, str]]:
    """What no state of this config can say of itself: what, given, expected."""
    length, reached = marks.length, marks.length_reached
    if length > config.positions_max:
        yield "length", length, f"at most {config.positions_max}"
    spare = config.ring_rows - config.window
    if not length <= reached <= length + spare:
        yield "length reached", reached, f"{length} to {length + spare}"
    group = group_tokens(config)
    if marks.length_min > length or marks.length_min % group:
        yield "least length", marks.length_min, f"a multiple of {group}, at most {length}"
    for half, start in (
        ("encoder", marks.encoder_window_start),
        ("decoder", marks.decoder_window_start),
    ):
        if start > length:
            yield f"{half} window start", start, f"at most {length}"
    vocabulary = config.engram.compressed_vocabulary if config.engram else 0
    for number in marks.recent_ids:
        if not NO_ID <= number < vocabulary:
            yield "recent id", number, f"{NO_ID} to {vocabulary - 1}"
    yield from _ring_problems(config, marks)


def _ring_problems(
    config: DeepseekV41Config, marks: StateMarks
) -> Iterator[tuple[str, object, str]]:
    """A ring that holds more than it has room for, or lacks rows that it must have.

    Those are the newest that were written, back to where the ring's rows begin: what the next token
    needs, after any rewind that is allowed too.
    """
    offsets = state_offsets(config)
    length = marks.length
    runs = [*offsets.rings, *offsets.compressors.values()]
    names = [f"window ring {number}" for number in range(len(offsets.rings))]
    names += [f"compressor ring of layer {layer}" for layer in offsets.compressors]
    starts = [marks.encoder_window_start] * config.decoder_start
    starts += [marks.decoder_window_start] * (config.layers - config.decoder_start)
    # A model whose draft weights were not loaded leaves the rings of its stages empty.
    starts += [length] * config.draft.stages
    starts += [marks.length_min] * len(offsets.compressors)
    for name, run, (first, end), start in zip(names, runs, marks.ring_ranges, starts, strict=True):
        oldest = max(start, marks.length_reached - run.entries)
        if not first <= end <= min(length, first + run.entries):
            yield name, (first, end), f"at most {run.entries} rows, none after {length - 1}"
        elif oldest < length and not (first <= oldest and end == length):
            yield name, (first, end), f"rows {oldest} to {length - 1}"
