"""Choice of entrypoints: golden vectors, balance, and what one name more or less moves."""

import json
import random
import runpy
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.window.partition import choose_entrypoint, choose_entrypoints

GOLDEN = Path(__file__).parents[2] / "golden"
VECTORS: dict[str, Any] = json.loads((GOLDEN / "window.json").read_text())
NAME_LISTS = st.lists(st.text("abcz0.-", min_size=1, max_size=8), min_size=1, unique=True)


def made_keys(count: int) -> list[bytes]:
    return [sha256(number.to_bytes(4, "little")).digest() for number in range(count)]


KEYS = made_keys(30_000)
FEW_KEYS = KEYS[:200]


def chosen(names: list[str], keys: list[bytes]) -> list[str]:
    return [names[at] for at in choose_entrypoints(keys, names)]


def test_golden_file_is_what_its_writer_writes() -> None:
    written = runpy.run_path(str(GOLDEN / "write_window.py"))["vectors"]()
    assert json.loads(json.dumps(written)) == VECTORS


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_choice_matches_golden_vectors_in_any_order_of_the_names(
    count: int, is_reversed: bool
) -> None:
    names = VECTORS["names"][:count]
    names = names[::-1] if is_reversed else names
    keys = [bytes.fromhex(one["key"]) for one in VECTORS["choices"]]
    assert chosen(names, keys) == [one["best_of_first"][str(count)] for one in VECTORS["choices"]]


def test_worked_example_of_the_format_page_is_the_first_golden_vector() -> None:
    page = (GOLDEN.parents[1] / "docs/formats/window.md").read_text()
    one = VECTORS["choices"][0]
    assert f"| key | `{one['key']}` |" in page
    assert f"| score of ep-a | `{one['score_ep_a']}` |" in page
    assert f"| chosen of ep-a, ep-b, ep-c | {one['best_of_first']['3']} |" in page


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_shares_are_even_within_a_few_percent(count: int) -> None:
    won = np.bincount(choose_entrypoints(KEYS, [f"ep{n}" for n in range(count)]), minlength=count)
    mean = len(KEYS) / count
    # Five standard deviations of a binomial count; 3.5 % for three entrypoints.
    assert np.all(np.abs(won - mean) <= 5 * mean**0.5)


@given(NAME_LISTS, st.data())
def test_name_that_goes_moves_only_its_own_keys(names: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    before = chosen(names, FEW_KEYS)
    if left:
        after = chosen(left, FEW_KEYS)
        assert [b for b in before if b != gone] == [
            a for a, b in zip(after, before, strict=True) if b != gone
        ]


@given(NAME_LISTS, st.text("abcz0.-", min_size=1, max_size=8))
def test_name_that_comes_takes_keys_and_moves_no_other(names: list[str], new: str) -> None:
    names = [name for name in names if name != new] or ["first"]
    before, after = chosen(names, FEW_KEYS), chosen([*names, new], FEW_KEYS)
    assert all(a in (b, new) for a, b in zip(after, before, strict=True))


def test_new_entrypoint_takes_a_like_share_from_each_of_the_others() -> None:
    names = ["ep0", "ep1", "ep2"]
    before, after = chosen(names, KEYS), chosen([*names, "ep3"], KEYS)
    taken = Counter(b for a, b in zip(after, before, strict=True) if a != b)
    assert all(0.9 <= taken[name] / (len(KEYS) / 12) <= 1.1 for name in names)


@given(NAME_LISTS, st.randoms(use_true_random=False))
def test_order_of_the_names_means_nothing(names: list[str], rng: random.Random) -> None:
    shuffled = rng.sample(names, len(names))
    assert chosen(names, FEW_KEYS) == chosen(shuffled, FEW_KEYS)


def test_one_key_is_chosen_for_as_among_many() -> None:
    names = ["ep2", "ep0", "ep1"]
    assert [choose_entrypoint(key, names) for key in FEW_KEYS] == chosen(names, FEW_KEYS)
    assert choose_entrypoints([], names).shape == (0,)


@pytest.mark.parametrize("names", [[], ["a", "b", "a"]])
def test_names_are_refused_when_none_or_twice(names: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="names of entrypoints"):
        choose_entrypoints(FEW_KEYS, names)
