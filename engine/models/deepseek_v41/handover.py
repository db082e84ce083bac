"""The state of a sequence as bytes, and back: for another process, machine or time.

A hand-over is everything that a sequence needs to go on at any length: the state slot, the bytes of
its blocks and what is known of them. A window is the encoder's share of the slot at a multiple of
128, which a store keeps apart from the blocks. Formats: docs/formats/v41-state.md. How the bytes
travel, and when, is decided elsewhere.
"""

from collections.abc import Iterable

import numpy as np
import torch
import xxhash

from kvstore.layout import BLOCK_TOKENS

from ...block_pool import BlockPool
from ...errors import HandoverRefused
from .config import DeepseekV41Config
from .handover_header import Identity, read_header, write_header
from .host_bytes import Buffer, view_bytes, write_bytes
from .layout import block_layout, owner_offsets
from .state import SequenceState, StatePool


def handover_parts(
    state: SequenceState, *, states: StatePool, blocks: BlockPool, model_id: bytes
) -> list[Buffer]:
    """The state at its length as buffers to send one after the other: header, slot, blocks.

    `model_id` (32 bytes) says which weights and arithmetic made the numbers. Slot and complete
    blocks are views of the pools' memory, where that is the host's: valid until the state changes.
    Rows that nobody may read are zeroed in the slot, rows beyond the length taken back, so equal
    states give equal bytes and nothing of an earlier sequence gets out. Not for a state in the
    middle of a replay: entries beyond its length, which `Chunk.entries_first` counts on, are not
    sent.
    """
    identity = _identity_of(states, blocks, model_id)
    length = state.length
    assert length <= state.capacity_tokens, (length, state.capacity_tokens)
    state.rewind(length)
    state.clear_unreadable()
    complete, open_tokens = divmod(length, BLOCK_TOKENS)
    body: list[Buffer] = [view_bytes(state.memory)]
    body += [_view_block(blocks, block_id) for block_id in state.block_ids[:complete]]
    if open_tokens:
        block = _view_block(blocks, state.block_ids[complete])
        body.append(_open_block(states.config, block, open_tokens))
    header = write_header(identity, state.marks(), body_xxh3=_xxh3_of(body))
    return [header, *body]


def pack_state(
    state: SequenceState, *, states: StatePool, blocks: BlockPool, model_id: bytes
) -> bytes:
    """`handover_parts` as one run of bytes, a copy."""
    return b"".join(handover_parts(state, states=states, blocks=blocks, model_id=model_id))


def unpack_state(
    data: Buffer, *, states: StatePool, blocks: BlockPool, model_id: bytes
) -> SequenceState:
    """A new state, in a slot and blocks of its own, that goes on where the packed one was.

    Raises HandoverRefused if `data` is not a whole hand-over of this model, or was changed on its
    way; StateSlotsExhausted or BlockPoolExhausted where there is no room. Nothing is allocated or
    written then.
    """
    data = _bytes_of(data)
    marks, header_bytes = read_header(data, _identity_of(states, blocks, model_id))
    state_bytes, block_bytes = states.offsets.state_bytes, blocks.block_bytes
    state = states.allocate()
    try:
        block_ids = blocks.allocate(-(-marks.length // BLOCK_TOKENS))
    except MemoryError:
        states.release(state)
        raise
    body = data[header_bytes:]
    write_bytes(state.memory, body[:state_bytes])
    for index, block_id in enumerate(block_ids):
        first = state_bytes + index * block_bytes
        write_bytes(blocks.memory[block_id], body[first : first + block_bytes])
    state.block_ids = block_ids
    state.resume(marks)
    return state


def pack_slot(
    state: SequenceState, into: memoryview, *, states: StatePool, blocks: BlockPool, model_id: bytes
) -> bytes:
    """The state without its blocks: its slot, copied into `into`; what is known of it is returned.

    As for `handover_parts`, what goes over depends on the sequence alone.
    """
    state.rewind(state.length)
    state.clear_unreadable()
    into[:] = view_bytes(state.memory)
    identity = _identity_of(states, blocks, model_id)
    return write_header(identity, state.marks(), body_xxh3=_xxh3_of([into]), has_blocks=False)


def unpack_slot(
    state: SequenceState,
    header: Buffer,
    slot: Buffer,
    *,
    length: int,
    states: StatePool,
    blocks: BlockPool,
    model_id: bytes,
) -> None:
    """Let a new state take the place of the one of `length` tokens that `pack_slot` was given.

    Its blocks come apart. Raises HandoverRefused as `unpack_state`, and changes nothing then.
    """
    slot = _bytes_of(slot)
    identity = _identity_of(states, blocks, model_id)
    marks, _ = read_header(_bytes_of(header), identity, slot)
    if marks.length != length:
        raise HandoverRefused("length", given=marks.length, expected=length)
    write_bytes(state.memory, slot)
    state.resume(marks)


def open_block_bytes(state: SequenceState, *, states: StatePool, blocks: BlockPool) -> bytes:
    """The block that is not complete, zero where no entry of this state stands.

    Empty if the length is a multiple of 128.
    """
    complete, open_tokens = divmod(state.length, BLOCK_TOKENS)
    if not open_tokens:
        return b""
    block = _view_block(blocks, state.block_ids[complete])
    return bytes(_open_block(states.config, block, open_tokens))


def has_window(state: SequenceState, anchor: int) -> bool:
    """Whether the encoder's window before position `anchor`, a multiple of 128, is all there.

    It stays there while the state grows to draft block tokens + 1 beyond the anchor.
    """
    return anchor > 0 and anchor % BLOCK_TOKENS == 0 and state.holds_window(anchor)


def window_state(state: SequenceState, anchor: int) -> memoryview:
    """The stored part of the slot, which has the window before `anchor`: a view or a copy.

    Bytes are those of `window_layout`. Rows that nobody may read are zeroed first.
    """
    assert has_window(state, anchor), f"no window at {anchor}, length {state.length}"
    state.clear_unreadable()
    return view_bytes(state.window_memory)


def restore_window(state: SequenceState, data: Buffer | torch.Tensor) -> None:
    """Give a state that was begun by `start_at` the stored window before its position: of the host,
    or uint8 [bytes] on the state's device.

    Raises HandoverRefused, and changes nothing, for another number of bytes. Whether they are the
    right ones is for the store to check: its records have key, layout and checksum. Rows that are
    no numbers spoil this sequence, and none beside it.
    """
    if not isinstance(data, torch.Tensor):
        data = _bytes_of(data)
    stored_bytes = len(state.window_memory)
    if len(data) != stored_bytes:
        raise HandoverRefused("bytes of a window", given=len(data), expected=stored_bytes)
    state.hold_stored_window()
    if isinstance(data, torch.Tensor):
        state.window_memory.copy_(data)
    else:
        write_bytes(state.window_memory, data)


def _bytes_of(data: Buffer) -> memoryview:
    view = memoryview(data)
    if not view.c_contiguous:
        raise HandoverRefused("buffer", given="one with gaps", expected="contiguous bytes")
    return view.cast("B")


def _identity_of(states: StatePool, blocks: BlockPool, model_id: bytes) -> Identity:
    """The pool's blocks are exact or padded, by their size."""
    layouts = [block_layout(states.config, is_padded=is_padded) for is_padded in (False, True)]
    fitting = [layout for layout in layouts if layout.block_bytes == blocks.block_bytes]
    assert fitting, f"blocks of {blocks.block_bytes} bytes are not of this model"
    return Identity(config=states.config, block_layout=fitting[0], model_id=model_id)


def _view_block(blocks: BlockPool, block_id: int) -> memoryview:
    assert not blocks.is_free(block_id), f"block {block_id} is free"
    return view_bytes(blocks.memory[block_id])


def _open_block(config: DeepseekV41Config, block: memoryview, tokens: int) -> bytearray:
    """A copy of a block with `tokens` tokens in it, zero where no entry of theirs stands."""
    source, copy = np.frombuffer(block, dtype=np.uint8), bytearray(len(block))
    target = np.frombuffer(copy, dtype=np.uint8)
    for owner in owner_offsets(config).values():
        entries = tokens // owner.ratio
        for run in (owner.index_data, owner.index_scales, owner.main):
            used = slice(run.offset, run.offset + entries * run.row_bytes)
            target[used] = source[used]
    return copy


def _xxh3_of(parts: Iterable[Buffer]) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()
