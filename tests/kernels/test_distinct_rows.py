"""Lists of rows, each row named once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference.distinct_rows import distinct_rows


@given(
    lists=st.integers(0, 6).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(-1, 9), min_size=length, max_size=length), min_size=1, max_size=4
        )
    )
)
def test_rows_are_named_once_and_found_by_every_list(lists: list[list[int]]) -> None:
    rows_U, places_TS = distinct_rows(torch.tensor(lists, dtype=torch.int64))
    assert rows_U.tolist() == sorted({row for rows in lists for row in rows if row >= 0})
    # One more row behind the others is what -1 finds.
    table = [*rows_U.tolist(), -1]
    assert [[table[place] for place in places] for places in places_TS.tolist()] == lists
