"""Buffers, lines of waiters, and views that are filled bit by bit."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.node.buffers import Buffer, BufferPool, round_size
from kvstore.node.io_cursor import VIEWS_PER_CALL_MAX, IoCursor
from kvstore.node.waiting import Turn, Waiter

MIB = 1 << 20


@given(st.integers(0, 1 << 32))
def test_buffer_size_is_at_most_a_quarter_more_than_asked(size_bytes: int) -> None:
    rounded = round_size(size_bytes)
    assert max(size_bytes, 64 << 10) <= rounded <= max(size_bytes * 5 / 4, 64 << 10)
    assert round_size(rounded) == rounded


def test_pool_makes_others_wait_when_it_is_used_up() -> None:
    pool = BufferPool(2 * MIB)
    first, second = pool.try_acquire(MIB), pool.try_acquire(MIB)
    assert first is not None
    assert second is not None
    assert pool.try_acquire(1) is None
    served: list[object] = []
    pool.wait(MIB, Waiter(served.append))
    pool.wait(MIB, Waiter(served.append))
    first.release()
    assert len(served) == 1
    second.release()
    assert len(served) == 2
    assert pool.used_bytes == 2 * MIB


def test_pool_lets_nobody_jump_the_line() -> None:
    pool = BufferPool(2 * MIB)
    held = pool.try_acquire(MIB)
    assert held is not None
    served: list[object] = []
    pool.wait(2 * MIB, Waiter(served.append))
    # There would be room for this one now.
    assert pool.try_acquire(64 << 10) is None
    held.release()
    assert len(served) == 1


def test_pool_serves_the_next_when_one_has_left_the_line() -> None:
    pool = BufferPool(MIB)
    held = pool.try_acquire(MIB)
    assert held is not None
    served: list[tuple[str, object]] = []
    impatient = Waiter(lambda value: served.append(("impatient", value)))
    pool.wait(MIB, impatient)
    pool.wait(MIB, Waiter(lambda value: served.append(("patient", value))))
    impatient.leave()
    held.release()
    assert [name for name, _ in served] == ["patient"]


def test_pool_never_holds_more_than_its_limit(rng: random.Random) -> None:
    pool = BufferPool(8 * MIB)
    held: list[Buffer] = []
    made: dict[int, Buffer] = {}
    for _ in range(2000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held))).release()
        else:
            buffer = pool.try_acquire(rng.randrange(1, 3 * MIB))
            if buffer is not None:
                held.append(buffer)
        made |= {id(buffer): buffer for buffer in held}
        kept = [buffer for buffers in pool._kept.values() for buffer in buffers]
        assert sum(buffer.size_bytes for buffer in [*held, *kept]) <= 8 * MIB
        assert pool.used_bytes == sum(buffer.size_bytes for buffer in held)


def test_pool_lets_a_read_pass_writes_that_wait_for_their_share() -> None:
    pool = BufferPool(4 * MIB)
    held = [pool.try_acquire(MIB, is_for_write=True) for _ in range(3)]
    assert None not in held
    served: list[str] = []
    assert pool.try_acquire(MIB, is_for_write=True) is None
    pool.wait(MIB, Waiter(lambda _: served.append("write")), is_for_write=True)
    read = pool.try_acquire(MIB)
    assert read is not None
    pool.wait(MIB, Waiter(lambda _: served.append("read")))
    read.release()
    assert served == ["read"]
    assert held[0] is not None
    held[0].release()
    assert served == ["read", "write"]
    assert not pool.has_line
    assert pool.used_bytes == 4 * MIB


def test_pool_says_what_could_never_fit() -> None:
    assert BufferPool(MIB).fits(MIB)
    assert BufferPool(4 * MIB).fits(3 * MIB, is_for_write=True)
    assert not BufferPool(4 * MIB).fits(3 * MIB + 1, is_for_write=True)
    assert not BufferPool(MIB).fits(MIB + 1)


@pytest.mark.parametrize("payload_bytes", [1, 64, 100, 11392])
def test_buffer_is_cut_into_pieces(payload_bytes: int) -> None:
    buffer = BufferPool(MIB).try_acquire(10 * payload_bytes)
    assert buffer is not None
    buffer.view[:] = bytes(len(buffer.view))
    for size_bytes in (payload_bytes, 2 * payload_bytes, payload_bytes):
        pieces = buffer.pieces(size_bytes)
        assert 5 <= len(pieces) <= 1024
        assert {len(piece) for piece in pieces} == {size_bytes}
        assert buffer.pieces(size_bytes) is pieces
        pieces[3][:] = b"p" * size_bytes
        assert bytes(buffer.view[3 * size_bytes : 4 * size_bytes]) == b"p" * size_bytes


def test_turn_goes_to_the_next_in_line() -> None:
    turn, served = Turn(), []
    assert turn.try_take()
    assert not turn.try_take()
    leaver = Waiter(lambda _: served.append("leaver"))
    turn.wait(leaver)
    turn.wait(Waiter(lambda _: served.append("next")))
    turn.wait(Waiter(lambda _: served.append("last")))
    leaver.leave()
    turn.release()
    assert served == ["next"]
    assert turn.is_taken
    turn.release()
    assert served == ["next", "last"]
    turn.release()
    assert turn.try_take()


@given(
    sizes=st.lists(st.integers(0, 9), max_size=600),
    steps=st.lists(st.integers(0, 40), max_size=50),
    arrived=st.integers(0, 30),
)
def test_cursor_fills_views_in_order(sizes: list[int], steps: list[int], arrived: int) -> None:
    data = bytes(i % 251 for i in range(sum(sizes)))
    views = [memoryview(bytearray(size)) for size in sizes]
    cursor = IoCursor(views)
    at = cursor.fill(memoryview(data[:arrived]))
    assert at == min(arrived, len(data))
    for step in steps:
        if not cursor.left_bytes:
            break
        window = cursor.window()
        assert len(window) <= VIEWS_PER_CALL_MAX
        count = 0
        for view in window:
            taken = min(len(view), step - count)
            view[:taken] = data[at + count : at + count + taken]
            count += taken
        cursor.advance(count)
        at += count
    assert cursor.left_bytes == len(data) - at
    assert b"".join(views)[:at] == data[:at]
