"""Why keys left: remembered for the newest ones, in bounded room."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.node.ghosts import REASON_NAMES, Ghosts, MissCounts, MissReason
from kvstore.wire import EvictReason


def reasons_of(ghosts: Ghosts, keys: list[bytes]) -> list[MissReason]:
    is_missed = np.ones(1, np.bool_)
    return [MissReason(ghosts.count_reasons(key, is_missed).index(1)) for key in keys]


def test_reasons_of_evictions_are_reasons_of_misses() -> None:
    assert {MissReason(reason).name for reason in EvictReason} == {"EXPIRED", "EVICTED", "ORPHANED"}
    names = "never_stored expired evicted orphaned rejected forgotten"
    assert " ".join(REASON_NAMES) == names


def test_newest_reason_of_a_key_counts(rng: random.Random) -> None:
    ghosts = Ghosts(1024)
    keys = [rng.randbytes(32) for _ in range(3)]
    assert reasons_of(ghosts, keys) == [MissReason.NEVER_STORED] * 3
    ghosts.remember(keys[:2], MissReason.FORGOTTEN)
    ghosts.remember(keys[1:], np.array([EvictReason.EXPIRED, EvictReason.ORPHANED], np.uint8))
    assert reasons_of(ghosts, keys) == [
        MissReason.FORGOTTEN,
        MissReason.EXPIRED,
        MissReason.ORPHANED,
    ]
    ghosts.remember([], MissReason.REJECTED)


@given(st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.sampled_from(MissReason))))
def test_a_key_has_its_last_reason_or_is_forgotten(left: list[tuple[bytes, MissReason]]) -> None:
    ghosts = Ghosts(16)
    last: dict[bytes, MissReason] = {}
    for key, reason in left:
        ghosts.remember([key], reason)
        last[key] = reason
    by_print = {key[:8]: reason for key, reason in last.items()}
    for key, reason in last.items():
        if by_print[key[:8]] is reason:
            assert reasons_of(ghosts, [key])[0] in (reason, MissReason.NEVER_STORED)
    if left:
        assert reasons_of(ghosts, [left[-1][0]]) == [left[-1][1]]


def test_most_of_the_keys_that_fit_are_remembered(rng: random.Random) -> None:
    ghosts = Ghosts(1 << 12)
    keys = [rng.randbytes(32) for _ in range(1 << 10)]
    ghosts.remember(keys, MissReason.EXPIRED)
    found = ghosts.count_reasons(b"".join(keys), np.ones(len(keys), np.bool_))
    assert found[MissReason.EXPIRED] > 0.85 * len(keys)


def test_only_missed_keys_are_counted(rng: random.Random) -> None:
    ghosts = Ghosts(1024)
    counts = MissCounts(ghosts)
    keys = [rng.randbytes(32) for _ in range(4)]
    ghosts.remember(keys[:2], MissReason.EXPIRED)
    counts.note(b"".join(keys), np.array([False, True, True, True]))
    counts.note(b"", np.zeros(0, np.bool_))
    assert counts.describe() == {
        **dict.fromkeys(REASON_NAMES, 0),
        **{"never_stored": 2, "expired": 1},
    }
