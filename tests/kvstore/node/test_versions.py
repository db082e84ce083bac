"""Two versions of one shard: writers that race end with the same one everywhere."""

import itertools

import pytest

from kvstore.node.versions import ShardVersion, choose_version
from kvstore.wire import WriteOutcome

SECOND_NS = 1_000_000_000
NOW_NS = 1_800_000_000 * SECOND_NS


@pytest.mark.parametrize(
    ("held", "offered", "age_s", "outcome"),
    [
        (ShardVersion(5, 3), ShardVersion(5, 3), 0.0, WriteOutcome.KNOWN),
        (ShardVersion(5, 3), ShardVersion(5, 3), 99.0, WriteOutcome.KNOWN),
        (ShardVersion(5, 3), ShardVersion(4, 3), 0.0, WriteOutcome.KEPT),
        (ShardVersion(5, 3), ShardVersion(4, 3), 9.999, WriteOutcome.KEPT),
        (ShardVersion(5, 3), ShardVersion(4, 3), 10.0, WriteOutcome.STORED),
        (ShardVersion(5, 3), ShardVersion(6, 3), 0.0, WriteOutcome.STORED),
        (ShardVersion(5, 3), ShardVersion(5, 4), 0.0, WriteOutcome.STORED),
        # The clock was set back since.
        (ShardVersion(5, 3), ShardVersion(4, 3), -1.0, WriteOutcome.STORED),
    ],
)
def test_version_is_chosen_by_age_and_checksum(
    held: ShardVersion, offered: ShardVersion, age_s: float, outcome: WriteOutcome
) -> None:
    created_ns = NOW_NS - round(age_s * SECOND_NS)
    assert choose_version(held, offered, held_created_ns=created_ns, now_ns=NOW_NS) is outcome


@pytest.mark.parametrize("versions", list(itertools.permutations([3, 7, 9])))
def test_racing_writers_end_with_the_largest_version_in_any_order(
    versions: tuple[int, ...],
) -> None:
    held = versions[0]
    for offered in versions[1:]:
        outcome = choose_version(
            ShardVersion(held, 0),
            ShardVersion(offered, 0),
            held_created_ns=NOW_NS - SECOND_NS,
            now_ns=NOW_NS,
        )
        if outcome is WriteOutcome.STORED:
            held = offered
    assert held == 9
