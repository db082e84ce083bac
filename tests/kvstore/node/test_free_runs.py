"""The free-run allocator against a plain set of free slots."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kvstore.node.free_runs import RUN_MAX, FreeRuns

SLOTS = 3000


class FreeRunsMachine(RuleBasedStateMachine):
    """Takes and gives against a set; the set knows no runs, and shares no code with them."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.runs = FreeRuns()
        self.runs.give(0, SLOTS)
        self.free = set(range(SLOTS))

    def longest(self) -> int:
        best = length = 0
        for slot in range(SLOTS):
            length = length + 1 if slot in self.free else 0
            best = max(best, length)
        return best

    @rule(target=taken, count=st.one_of(st.integers(1, 40), st.integers(1, RUN_MAX)))
    def take(self, count: int) -> object:
        longest = self.longest()
        taken = self.runs.take(count)
        if taken is None:
            assert not self.free
            return multiple()
        start, length = taken
        assert length == min(count, longest)
        slots = set(range(start, start + length))
        assert slots <= self.free
        self.free -= slots
        return taken

    @rule(run=taken, first=st.integers(0, RUN_MAX), count=st.integers(1, RUN_MAX))
    def give_a_part(self, run: tuple[int, int], first: int, count: int) -> None:
        start, length = run
        slots = range(start + first, min(start + first + count, start + length))
        if slots and not self.free & set(slots):
            self.runs.give(slots.start, len(slots))
            self.free |= set(slots)

    @rule()
    def remove_the_first_run(self) -> None:
        runs = self.runs.runs()
        if runs:
            start, count = runs[0]
            assert not self.runs.has_run(start, count + 1)
            self.runs.remove_run(start, count)
            self.free -= set(range(start, start + count))
            self.runs.give(start, count)
            self.free |= set(range(start, start + count))

    @invariant()
    def runs_are_the_maximal_runs_of_the_free_slots(self) -> None:
        edges = [s for s in range(SLOTS + 1) if (s in self.free) != (s - 1 in self.free)]
        expected = [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        assert self.runs.runs() == expected
        assert self.runs.slot_count == len(self.free)


TestFreeRunsMachine = FreeRunsMachine.TestCase
TestFreeRunsMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_free_runs_give_the_shortest_run_that_fits() -> None:
    runs = FreeRuns()
    for start, count in ((0, 10), (20, 5), (30, 7)):
        runs.give(start, count)
    assert runs.take(6) == (30, 6)
    assert runs.take(5) == (20, 5)
    assert runs.take(11) == (0, 10)
    assert runs.take(2) == (36, 1)
    assert runs.take(1) is None


def test_free_runs_give_the_same_slots_when_asked_the_same() -> None:
    def play() -> list[tuple[int, int] | None]:
        runs = FreeRuns()
        runs.give(0, 100)
        taken = [runs.take(7) for _ in range(5)]
        runs.give(7, 3)
        runs.give(21, 4)
        return [*taken, runs.take(3), runs.take(3), runs.take(50)]

    assert play() == play()
