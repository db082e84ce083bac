"""A sequence is copied from one engine to another by what a hand-over sends, without an agent."""

from dataclasses import replace

from engine.sequence import Sequence
from tests.engine.llm_engine.engine_bench import EngineBench


def move(source: EngineBench, sequence: Sequence, target: EngineBench) -> bool:
    """Let a copy of a detached sequence decode in another engine; False if that has no room."""
    opened = copy_into(source, sequence, target)
    if opened is None:
        return False
    target.engine.attach(opened)
    if target is not source:
        target.expect(opened.request)
    return True


def copy_into(source: EngineBench, sequence: Sequence, target: EngineBench) -> Sequence | None:
    """A copy of a detached sequence that the other engine may attach; None if it has no room."""
    layout = source.runner.state_layout
    slot = None if layout is None else bytearray(layout.block_bytes)
    marks = source.runner.pack_state(sequence, None if slot is None else memoryview(slot))
    complete = sequence.block_ids[: sequence.complete_blocks]
    blocks = [bytes(source.runner.pool.buffer(block_id)) for block_id in complete]
    if open_block := source.runner.open_block_bytes(sequence):
        blocks.append(open_block)
    request = replace(
        sequence.request,
        answered_ids=tuple(sequence.answer_ids),
        replay_first=sequence.replay_first,
        ends_after_prefill=False,
    )
    opened = target.engine.open_for_handover(request)
    if opened is None:
        return None
    for block_id, data in zip(opened.block_ids, blocks, strict=False):
        target.runner.pool.buffer(block_id)[:] = data
    target.runner.unpack_state(opened, marks, slot)
    return opened
