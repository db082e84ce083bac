"""The allocator against a model that knows every page: nothing twice, nothing lost, gaps joined."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.arena.allocator import RangeAllocator

PAGE = 4096


class AllocatorMachine(RuleBasedStateMachine):
    """`owners[page]` is the offset of the range that a page belongs to, None if it is free."""

    @initialize(pages=st.integers(1, 40))
    def begin(self, pages: int) -> None:
        self.allocator = RangeAllocator(pages * PAGE)
        self.owners: list[int | None] = [None] * pages
        self.lengths: dict[int, int] = {}

    def gaps(self) -> list[tuple[int, int]]:
        """(first page, pages) of each free range."""
        found, start = [], None
        for page, owner in enumerate([*self.owners, -1]):
            if owner is None and start is None:
                start = page
            elif owner is not None and start is not None:
                found.append((start, page - start))
                start = None
        return found

    @rule(length_bytes=st.integers(1, 45 * PAGE))
    def allocate(self, length_bytes: int) -> None:
        pages = -(-length_bytes // PAGE)
        fitting = [gap for gap in self.gaps() if gap[1] >= pages]
        offset = self.allocator.allocate(length_bytes)
        if not fitting:
            assert offset is None
            return
        assert offset is not None
        assert offset % PAGE == 0
        best = min(fitting, key=lambda gap: (gap[1], gap[0]))
        assert offset == best[0] * PAGE, "the smallest gap that fits, the first of equals"
        mine = range(offset // PAGE, offset // PAGE + pages)
        assert all(self.owners[page] is None for page in mine)
        for page in mine:
            self.owners[page] = offset
        self.lengths[offset] = pages

    @precondition(lambda self: bool(getattr(self, "lengths", None)))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.lengths)))
        self.allocator.release(offset)
        del self.lengths[offset]
        self.owners = [None if owner == offset else owner for owner in self.owners]

    @invariant()
    def free_bytes_are_those_of_the_model(self) -> None:
        if not hasattr(self, "owners"):
            return
        assert self.allocator.free_bytes == self.owners.count(None) * PAGE
        longest = max((pages for _, pages in self.gaps()), default=0)
        assert self.allocator.largest_free_bytes == longest * PAGE, "neighbours are joined"

    def teardown(self) -> None:
        if not hasattr(self, "lengths"):
            return
        for offset in list(self.lengths):
            self.allocator.release(offset)
        assert self.allocator.largest_free_bytes == self.allocator.size_bytes


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_allocator_agrees_with_a_model_of_every_page = AllocatorMachine.TestCase


def test_a_range_is_given_back_once() -> None:
    allocator = RangeAllocator(4 * PAGE)
    offset = allocator.allocate(PAGE)
    assert offset == 0
    allocator.release(0)
    with pytest.raises(KeyError):
        allocator.release(0)
    with pytest.raises(KeyError):
        allocator.release(PAGE)
