"""Whatever happens to an engine in whatever order: its books are right, and its answers too.

Logits are compared, bit for bit, with those of each request alone, with the same replay. Each test
sees that its examples came to what they are for.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.llm_engine.engine_bench import dense_summing, llama, nano, summing
from tests.engine.llm_engine.engine_machine import (
    OPERATIONS,
    EngineMachine,
    Family,
    PlainMachine,
)

SUMMING = Family(
    make_runner=summing,
    prompts=((60, 8), (125, 1), (253, 2), (250, 5), (392, 4), (507, 4), (506, 9)),
    pool_blocks=range(6, 8),
    longest_answer=150,
)
DENSE = replace(SUMMING, make_runner=dense_summing)
LLAMA = replace(SUMMING, make_runner=llama, longest_answer=20)
NANO = Family(
    make_runner=nano,
    prompts=((126, 0), (394, 3), (381, 3)),
    pool_blocks=range(5, 7),
    longest_answer=5,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NAMES = [name for name, weight in OPERATIONS.items() for _ in range(weight)]
NUMBERS = st.integers(0, 2**24 - 1)


def check_engines(
    family: Family, examples: int, operations: int, make: type[EngineMachine] = EngineMachine
) -> Counter[str]:
    """What has happened; the machine asserts after each operation, and at the end."""
    seen = Counter[str]()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        NUMBERS,
        st.lists(
            st.tuples(st.sampled_from(NAMES), NUMBERS),
            min_size=operations // 2,
            max_size=operations,
        ),
    )
    def run_one(setting: int, chosen: list[tuple[str, int]]) -> None:
        machine = make(family, setting, seen)
        for name, number in chosen:
            machine.do(name, number)
        machine.finish()

    run_one()
    return seen


def test_books_and_bits_are_right_after_any_operations_with_window_state() -> None:
    seen = check_engines(SUMMING, 60, 100)
    aims = ("preempted", "exact hit", "replayed", "shared")
    assert min(seen[what] for what in aims) > 0, seen


def test_no_block_of_others_changes_where_a_store_keeps_what_a_replay_led_to() -> None:
    seen = check_engines(SUMMING, 60, 100, PlainMachine)
    aims = ("cold", "cold and preempted", "replayed", "shared", "cold blocks", "cold windows")
    assert min(seen[what] for what in aims) > 0, seen


def test_books_and_bits_are_right_after_any_operations_of_a_dense_model() -> None:
    seen = check_engines(DENSE, 25, 100)
    aims = ("preempted", "exact hit", "shared")
    assert min(seen[what] for what in aims) > 0, seen


@pytest.mark.parametrize(("family", "examples"), [(LLAMA, 4), (NANO, 2)])
def test_books_and_bits_of_real_layers_are_right_after_any_operations(
    family: Family, examples: int
) -> None:
    """Each of their tokens takes as long as a hundred of those above."""
    check_engines(family, examples, 24)
