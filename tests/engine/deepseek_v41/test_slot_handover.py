"""A state goes over without its blocks, which travel by themselves."""

from __future__ import annotations

import pytest

from engine.errors import HandoverRefused
from engine.models.deepseek_v41.handover import open_block_bytes

from .handover_bench import LENGTHS, Engine


@pytest.mark.parametrize("length", LENGTHS)
def test_slot_goes_over_apart_from_the_blocks(length: int) -> None:
    source, target = Engine.make(0x5A), Engine.make(0xFF)
    state = source.begin(length)
    header, slot = source.pack_slot(state)
    moved = target.states.allocate()
    moved.block_ids = target.blocks.allocate(-(-length // 128))
    complete = [bytes(source.blocks.buffer(block)) for block in state.block_ids[: length // 128]]
    open_block = open_block_bytes(state, states=source.states, blocks=source.blocks)
    assert len(open_block) == (source.blocks.block_bytes if length % 128 else 0)
    for block_id, data in zip(moved.block_ids, [*complete, open_block], strict=False):
        target.blocks.buffer(block_id)[:] = data
    target.unpack_slot(moved, header, slot, length)
    assert target.pack(moved) == source.pack(state)


@pytest.mark.parametrize(
    ("length", "header_more", "slot_less", "match"),
    [
        (130, 0, 0, "hand-over: length: given 131, expected 130"),
        (131, 1, 0, "length in bytes"),
        (131, 0, 1, "length in bytes"),
        (131, 1, 1, "length in bytes"),
    ],
)
def test_slot_of_another_length_is_refused_and_changes_nothing(
    length: int, header_more: int, slot_less: int, match: str
) -> None:
    source, target = Engine.make(), Engine.make(0x11)
    header, slot = source.pack_slot(source.begin(131))
    new = target.states.allocate()
    before = target.contents()
    with pytest.raises(HandoverRefused, match=match):
        target.unpack_slot(new, header + bytes(header_more), slot[slot_less:], length)
    assert target.contents() == before
    assert new.length == 0
