"""Who gives way when blocks are short: the shortest answer, and never the only one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.preemption import Standing, choose_victim


@pytest.mark.parametrize(
    ("standings", "victim"),
    [
        ([], None),
        ([Standing(0, 0)], None),
        ([Standing(9, 0), Standing(3, 1), Standing(5, 2)], 1),
        # The length of the answer counts, whoever came first.
        ([Standing(1, 0), Standing(2, 7)], 0),
        # Of equals it is the latest in line.
        ([Standing(4, 2), Standing(4, 5), Standing(4, 3)], 1),
    ],
)
def test_shortest_answer_gives_way_unless_it_is_alone(
    standings: list[Standing], victim: int | None
) -> None:
    assert choose_victim(standings) == victim


@given(st.lists(st.integers(0, 5), min_size=2, max_size=8))
def test_one_of_them_is_never_thrown_out_by_the_others(answers: list[int]) -> None:
    """So each of them ends: the strongest goes on, and then the next."""
    standings = [Standing(tokens, order) for order, tokens in enumerate(answers)]
    longest = max(answers)
    strongest = standings[answers.index(longest)]
    while len(standings) > 1:
        victim = choose_victim(standings)
        assert victim is not None
        assert standings.pop(victim) is not strongest
    assert standings == [strongest]
    assert choose_victim(standings) is None
