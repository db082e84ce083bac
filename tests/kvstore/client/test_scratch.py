"""Scratch memory is lent, kept within a bound, and never lent twice at once."""

import numpy as np

from kvstore.client.scratch import KEPT_AREAS_MAX, ScratchPool


def test_an_area_is_writable_as_large_as_asked_and_where_it_says() -> None:
    with ScratchPool().lend(1000) as (view, address):
        assert len(view) >= 1000
        assert not view.readonly
        assert np.frombuffer(view, np.uint8).ctypes.data == address


def test_an_area_that_came_back_is_lent_again_to_who_needs_no_more() -> None:
    pool = ScratchPool()
    with pool.lend(1000) as (_, first):
        pass
    with pool.lend(500) as (_, second):
        assert second == first
    with pool.lend(2000) as (view, third):
        assert third != first
        assert len(view) >= 2000


def test_two_borrowers_never_share_an_area() -> None:
    pool = ScratchPool()
    with pool.lend(1000):
        pass
    with pool.lend(1000) as (one, _), pool.lend(1000) as (other, _):
        one[:], other[:] = b"a" * len(one), b"b" * len(other)
        assert one == b"a" * len(one)


def test_the_smallest_area_that_fits_is_lent() -> None:
    pool = ScratchPool()
    with pool.lend(1000) as (_, small), pool.lend(9000) as (_, large):
        pass
    with pool.lend(900) as (_, first), pool.lend(900) as (_, second):
        assert (first, second) == (small, large)


def test_only_the_few_largest_areas_are_kept() -> None:
    pool = ScratchPool()
    sizes = [1000 * (index + 1) for index in range(KEPT_AREAS_MAX + 3)]
    lent = [pool.lend(size) for size in sizes]
    addresses = [area.__enter__()[1] for area in lent]
    for area in lent:
        area.__exit__(None, None, None)
    again = [pool.lend(1) for _ in range(KEPT_AREAS_MAX)]
    assert [area.__enter__()[1] for area in again] == addresses[-KEPT_AREAS_MAX:]
    for area in again:
        area.__exit__(None, None, None)


def test_an_area_comes_back_when_its_borrower_fails() -> None:
    pool = ScratchPool()
    address = 0
    try:
        with pool.lend(1000) as (_, address):
            raise OSError("broken")
    except OSError:
        with pool.lend(1000) as (_, again):
            assert again == address


def test_nothing_may_be_asked_for() -> None:
    """A code of one data shard and no parity needs no scratch memory."""
    with ScratchPool().lend(0) as (_, address):
        assert address
