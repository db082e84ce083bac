"""A state goes over as bytes and goes on; bytes that are no state of the model change nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BlockPoolExhausted, HandoverRefused, StateSlotsExhausted
from engine.models.deepseek_v41.handover import (
    handover_parts,
    has_window,
    pack_state,
    restore_window,
    unpack_state,
    window_state,
)
from engine.models.deepseek_v41.layout import (
    block_layout,
    handover_layout,
    window_layout,
)
from engine.models.deepseek_v41.rows import Chunk
from engine.models.deepseek_v41.state import NO_ID, SequenceState

from .handover_bench import LENGTHS, MODEL_ID, NANO, Engine, rows_of
from .model_bench import ModelBench, nano_bench

HEADER_BYTES = 448


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_padded", [False, True])
def test_state_of_any_length_goes_over_and_goes_on(length: int, is_padded: bool) -> None:
    source = Engine.make(is_padded=is_padded)
    state = source.begin(length)
    data = source.pack(state)
    target = Engine.make(0xFF, is_padded=is_padded)
    target.blocks.allocate(1)
    target.states.allocate()
    moved = target.unpack(data)
    assert moved.length == length
    assert moved.recent_ids == state.recent_ids
    assert target.pack(moved) == data
    for engine, its in ((source, state), (target, moved)):
        engine.grow(its, 5)
        engine.grow(its, 150)
    assert target.pack(moved) == source.pack(state)


@pytest.mark.parametrize("length", LENGTHS)
def test_bytes_of_a_state_show_nothing_of_what_was_in_its_memory_before(length: int) -> None:
    used, clean = Engine.make(0x5A), Engine.make()
    assert used.pack(used.begin(length)) == clean.pack(clean.begin(length))


def test_bytes_of_a_state_do_not_depend_on_the_pieces_it_grew_by() -> None:
    one, other = Engine.make(), Engine.make()
    state = other.begin(3)
    for tokens in (125, 1, 22, 80, 26):
        other.grow(state, tokens)
    assert other.pack(state) == one.pack(one.begin(257))


def test_rows_and_entries_that_were_taken_back_do_not_go_over() -> None:
    source = Engine.make()
    state = source.begin(131)
    source.grow(state, 6)
    state.rewind(132)
    data = source.pack(state)
    body = data[HEADER_BYTES:]
    ring = torch.frombuffer(bytearray(body[: 38 * 66]), dtype=torch.uint8).view(38, 66)
    dead = [slot for slot in range(38) if not ring[slot].any()]
    assert dead == sorted(position % 38 for position in range(132, 137))
    target = Engine.make(0xFF)
    moved = target.unpack(data)
    for engine, its in ((source, state), (target, moved)):
        with pytest.raises(AssertionError, match="rewind to 130, allowed are 131 to 132"):
            its.rewind(130)
        its.rewind(131)
        engine.grow(its, 40)
    assert target.pack(moved) == source.pack(state)


def test_rows_that_nobody_committed_do_not_go_over() -> None:
    """A pass that ended after its first layer had written the rows of a draft."""
    source, target = Engine.make(), Engine.make(0xFF)
    state = source.begin(131)
    state.write_window_rows(0, 131, rows_of(0, 131, 137, 66))
    moved = target.unpack(source.pack(state))
    assert moved.marks().length_reached == 137
    source.grow(state, 6)
    target.grow(moved, 6)
    assert target.pack(moved) == source.pack(state)


def test_parts_are_the_pools_own_memory_but_for_the_header_and_the_open_block() -> None:
    source = Engine.make()
    state = source.begin(300)
    parts = handover_parts(state, states=source.states, blocks=source.blocks, model_id=MODEL_ID)
    assert b"".join(parts) == source.pack(state)
    assert len(parts) == 1 + 1 + 3
    state.memory[0] += 1
    source.blocks.memory[state.block_ids[1], 0] += 1
    assert parts[1][0] == int(state.memory[0])
    assert parts[3][0] == int(source.blocks.memory[state.block_ids[1], 0])


def test_header_has_the_offsets_of_the_format() -> None:
    source = Engine.make()
    state = source.begin(130)
    source.grow(state, 4)
    state.rewind(131)
    state.encoder_window_start, state.decoder_window_start = 5, 120
    data = source.pack(state)
    block_bytes = block_layout(NANO).block_bytes
    body = data[HEADER_BYTES:]
    assert len(body) == source.states.offsets.state_bytes + 2 * block_bytes
    assert struct.unpack_from("<8sIIQ", data) == (b"CACHV41S", 1, HEADER_BYTES, len(data))
    assert struct.unpack_from("<QQ", data, 24) == (
        xxhash.xxh3_64_intdigest(data[40:HEADER_BYTES]),
        xxhash.xxh3_64_intdigest(body),
    )
    assert data[40:72] == MODEL_ID
    assert data[72:104] == handover_layout(NANO).fingerprint
    assert data[104:136] == block_layout(NANO).fingerprint
    assert struct.unpack_from("<QQQQQ", data, 136) == (131, 134, 0, 5, 120)
    assert struct.unpack_from("<II", data, 176) == (14, 9)
    # Window rings of 38 rows, compressor rings of 7.
    assert struct.unpack_from("<28Q", data, 184) == (96, 131) * 12 + (127, 131) * 2
    ids = struct.unpack_from("<9i", data, 184 + 14 * 16)
    assert ids == (NO_ID, NO_ID, NO_ID, *range(125, 131))
    assert not any(data[184 + 14 * 16 + 9 * 4 : HEADER_BYTES])
    assert body[: source.states.offsets.state_bytes] == state.memory.numpy().tobytes()


def expect_refusal(data: bytes | bytearray, match: str = "") -> None:
    """Refused with a message that says what is wrong, and the pools are as they were."""
    target = Engine.make(0x11)
    before = target.contents()
    with pytest.raises(HandoverRefused, match=match):
        target.unpack(data)
    assert target.contents() == before


@pytest.fixture(scope="module")
def packed() -> bytes:
    source = Engine.make()
    return source.pack(source.begin(131))


@pytest.mark.parametrize("size", [0, 1, 8, 39, 40, 183, 184, 447, 448, 449, 20_000, -449, -1])
def test_state_that_was_cut_off_is_refused(packed: bytes, size: int) -> None:
    expect_refusal(packed[:size], "hand-over: length in bytes: given")


def test_state_with_more_bytes_behind_it_is_refused(packed: bytes) -> None:
    expect_refusal(packed + b"\0", "hand-over: length in bytes: given")


def test_every_changed_byte_of_the_header_is_found(packed: bytes) -> None:
    target = Engine.make(0x11)
    before = target.contents()
    for offset in range(HEADER_BYTES):
        data = bytearray(packed)
        data[offset] ^= 1 << offset % 8
        with pytest.raises(HandoverRefused):
            target.unpack(data)
    assert target.contents() == before


@given(offset=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_a_changed_byte_of_the_body_is_found(packed: bytes, offset: float, change: int) -> None:
    data = bytearray(packed)
    data[HEADER_BYTES + int(offset * (len(data) - HEADER_BYTES))] ^= change
    with pytest.raises(HandoverRefused, match="checksum of the body"):
        Engine.make().unpack(data)


def rewritten(data: bytes, layout: str, offset: int, *values: object) -> bytes:
    """Other facts under checksums that are right: what a wrong sender would send."""
    changed = bytearray(data)
    struct.pack_into(layout, changed, offset, *values)
    struct.pack_into("<Q", changed, 16, len(changed))
    struct.pack_into("<Q", changed, 24, xxhash.xxh3_64_intdigest(bytes(changed[40:HEADER_BYTES])))
    return bytes(changed)


@pytest.mark.parametrize(
    ("layout", "offset", "value", "match"),
    [
        ("<8s", 0, b"CACHV41T", "magic"),
        ("<I", 8, 2, "version: given 2, expected 1"),
        ("<I", 12, 512, "checksum of the header"),
        ("<I", 12, 100, "header bytes: given 100"),
        ("<I", 12, 1 << 31, "header bytes: given 2147483648"),
        ("<32s", 40, bytes(32), "model id: given 0000"),
        ("<32s", 72, bytes(32), "state layout: given 0000"),
        ("<32s", 104, bytes(32), "block layout: given 0000"),
        ("<Q", 136, 4097, "length: given 4097, expected at most 4096"),
        ("<Q", 136, 1 << 63, "length: given 9223372036854775808"),
        ("<Q", 136, 130, "window ring 0|compressor ring"),
        ("<Q", 136, 128, "window ring 0"),
        ("<Q", 136, 0, "length reached: given 131, expected 0 to 6"),
        ("<Q", 144, 138, "length reached: given 138, expected 131 to 137"),
        ("<Q", 144, 130, "length reached: given 130"),
        ("<Q", 152, 256, "least length: given 256, expected a multiple of 2, at most 131"),
        ("<Q", 152, 1, "least length: given 1"),
        ("<Q", 160, 132, "encoder window start: given 132, expected at most 131"),
        ("<Q", 168, 132, "decoder window start: given 132"),
        ("<I", 176, 13, "number of rings: given 13, expected 14"),
        ("<I", 180, 0, "number of recent ids: given 0, expected 9"),
        ("<Q", 184, 92, r"window ring 0: given \(92, 131\), expected at most 38 rows"),
        ("<Q", 184, 94, r"window ring 0: given \(94, 131\), expected rows 93 to 130"),
        ("<Q", 184 + 8, 130, "window ring 0: given .* expected rows 93 to 130"),
        ("<Q", 184 + 8 * 16 + 8, 132, "window ring 8: .* none after 130"),
        ("<QQ", 184 + 11 * 16, (9, 8), "window ring 11"),
        ("<QQ", 184 + 13 * 16, (131, 131), "compressor ring of layer 4: .* rows 124 to 130"),
        ("<Q", 184 + 13 * 16, 125, "compressor ring of layer 4: .* rows 124 to 130"),
        ("<i", 184 + 14 * 16, -2, "recent id: given -2, expected -1 to 383"),
        ("<i", 184 + 14 * 16 + 32, 384, "recent id: given 384"),
    ],
)
def test_state_that_cannot_be_is_refused_whatever_its_checksums_say(
    packed: bytes, layout: str, offset: int, value: object, match: str
) -> None:
    values = value if isinstance(value, tuple) else (value,)
    expect_refusal(rewritten(packed, layout, offset, *values), match)


def test_state_with_a_block_too_few_is_refused_whatever_its_checksums_say(packed: bytes) -> None:
    data = packed[: -block_layout(NANO).block_bytes]
    digest = xxhash.xxh3_64_intdigest(data[HEADER_BYTES:])
    expect_refusal(rewritten(data, "<Q", 32, digest), "length in bytes")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Engine.make(is_padded=True), "block layout"),
        (lambda: Engine.make(config=replace(NANO, window=16)), "state layout"),
        (lambda: Engine.make(config=replace(NANO, index_dim=64)), "block layout"),
        (lambda: Engine.make(config=replace(NANO, engram=None)), "number of recent ids"),
        (lambda: Engine.make(config=replace(NANO, positions_max=130)), "length: given 131"),
    ],
)
def test_state_of_another_model_is_refused(
    packed: bytes, make: Callable[[], Engine], match: str
) -> None:
    target = make()
    before = target.contents()
    with pytest.raises(HandoverRefused, match=match):
        target.unpack(packed)
    assert target.contents() == before


def test_state_of_other_weights_is_refused(packed: bytes) -> None:
    target = Engine.make()
    with pytest.raises(HandoverRefused, match=r"model id: given 000102.*expected 0101"):
        unpack_state(packed, states=target.states, blocks=target.blocks, model_id=b"\1" * 32)


@pytest.mark.parametrize(
    ("free_slots", "capacity_blocks", "error"),
    [(2, 1, BlockPoolExhausted), (0, 6, StateSlotsExhausted)],
)
def test_nothing_is_taken_when_there_is_no_room(
    packed: bytes, free_slots: int, capacity_blocks: int, error: type[Exception]
) -> None:
    target = Engine.make(0x11, capacity_blocks=capacity_blocks)
    for _ in range(2 - free_slots):
        target.states.allocate()
    before = target.contents()
    with pytest.raises(error):
        target.unpack(packed)
    assert target.contents() == before


@pytest.mark.parametrize("anchor", [128, 256])
@pytest.mark.parametrize("late", [0, 1, 6])
def test_window_is_stored_at_its_anchor_or_a_draft_later(anchor: int, late: int) -> None:
    source = Engine.make()
    state = source.begin(anchor)
    source.grow(state, late)
    stored = bytes(window_state(state, anchor))
    assert len(stored) == window_layout(NANO).block_bytes

    target = Engine.make(0xFF)
    moved = target.states.allocate()
    moved.start_at(anchor, range(anchor - 9, anchor))
    restore_window(moved, stored)
    first = anchor - NANO.window
    assert moved.encoder_window_start == first
    for layer in range(NANO.decoder_start):
        expected = rows_of(layer, first, anchor, 66)
        assert torch.equal(moved.read_window_rows(layer, first, anchor), expected)
        with pytest.raises(AssertionError, match=f"readable are {first} to {anchor - 1}"):
            moved.read_window_rows(layer, first - 1, anchor)
    with pytest.raises(AssertionError, match=f"readable are {anchor} to"):
        moved.read_window_rows(NANO.decoder_start, anchor - 1, anchor)
    # It goes on, and is a state like any other.
    moved.block_ids = target.blocks.allocate(anchor // 128)
    target.grow(moved, 7)
    again = Engine.make(0x22)
    assert again.pack(again.unpack(target.pack(moved))) == target.pack(moved)


def test_window_shows_nothing_of_what_was_in_its_memory_before() -> None:
    used, clean = Engine.make(0x5A), Engine.make()
    windows = [bytes(window_state(engine.begin(128), 128)) for engine in (used, clean)]
    assert windows[0] == windows[1]


def test_window_is_a_view_of_the_slot() -> None:
    source = Engine.make()
    state = source.begin(128)
    window = window_state(state, 128)
    state.window_rings[0].rows[0] += 1
    assert window[0] == int(state.memory[0])


@pytest.mark.parametrize(
    ("length", "anchor", "expected"),
    [
        (127, 128, False),
        (128, 128, True),
        (134, 128, True),
        (135, 128, False),
        (256, 128, False),
        (256, 256, True),
        (130, 129, False),
        (128, 0, False),
    ],
)
def test_window_is_there_for_a_draft_after_its_anchor(
    length: int, anchor: int, expected: bool
) -> None:
    state = Engine.make().begin(length)
    assert has_window(state, anchor) is expected
    if not expected:
        with pytest.raises(AssertionError, match=f"no window at {anchor}"):
            window_state(state, anchor)


def test_window_is_not_there_when_a_part_of_it_must_not_be_seen() -> None:
    source = Engine.make()
    state = source.begin(128)
    state.encoder_window_start = 97
    assert not has_window(state, 128)
    state.encoder_window_start = 96
    assert has_window(state, 128)


def test_window_with_gaps_or_for_a_state_that_has_begun_changes_nothing(bench: ModelBench) -> None:
    state = bench.begin(256)
    bench.run(state, [5] * 3)
    before = state.memory.clone()
    with pytest.raises(AssertionError):
        restore_window(state, bytes(len(state.window_memory)))
    with pytest.raises(HandoverRefused, match="contiguous"):
        restore_window(state, memoryview(bytes(2 * len(state.window_memory)))[::2])
    assert torch.equal(state.memory, before)
    bench.end(state)


@pytest.mark.parametrize("change", [-1, 1])
def test_window_of_another_length_is_refused(change: int) -> None:
    target = Engine.make(0x11)
    state = target.states.allocate()
    state.start_at(128, range(9))
    before = target.contents()
    stored_bytes = window_layout(NANO).block_bytes
    with pytest.raises(HandoverRefused, match=f"given {stored_bytes + change}, expected"):
        restore_window(state, bytes(stored_bytes + change))
    assert target.contents() == before
    assert state.encoder_window_start == 128


GO_ON_TOKENS = 6


def greedy(bench: ModelBench, state: SequenceState, token_id: int, tokens: int) -> list[int]:
    """Each token and the greedy choice after it."""
    token_ids = [token_id]
    for _ in range(tokens):
        result = bench.model.forward([Chunk(state=state, token_ids=token_ids[-1:])])
        token_ids.append(int(result.logits[0][-1].argmax()))
    return token_ids


def go_on(data: bytes) -> list[int]:
    """What the nano model says next in a slot and blocks used before."""
    bench = nano_bench()
    for pool in (bench.states, bench.blocks):
        pool.memory.fill_(0xFF)
    bench.blocks.allocate(2)
    state = unpack_state(data, states=bench.states, blocks=bench.blocks, model_id=MODEL_ID)
    state.block_ids += bench.blocks.allocate(1)
    return greedy(bench, state, 7, GO_ON_TOKENS)


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return nano_bench()


@pytest.mark.parametrize("length", [1, 33, 128, 131, 255])
def test_model_goes_on_with_equal_tokens_after_a_cut(bench: ModelBench, length: int) -> None:
    state = bench.begin(length + GO_ON_TOKENS)
    token_ids = torch.randint(3, 380, (length,), generator=torch.Generator().manual_seed(length))
    bench.run(state, token_ids.tolist())
    data = pack_state(state, states=bench.states, blocks=bench.blocks, model_id=MODEL_ID)
    assert go_on(data) == greedy(bench, state, 7, GO_ON_TOKENS)
    bench.end(state)
