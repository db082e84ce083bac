"""Which shards are taken back after a save that too few nodes took."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import wire
from kvstore.client.recall import BATCHES_MAX, Recalls, RefusedBatch, choose_recalled
from tests.kvstore.client.scripted_peer import Dial

K = 4
OURS, THEIRS = 77, 78
Answer = NDArray[Any] | None


def answer(*rows: tuple[int, int, int] | None) -> NDArray[Any]:
    """A node's answer; each row: block_xxh3, generation, last_used_s, or None: not here."""
    found = np.zeros(len(rows), wire.LOCATION)
    for row, one in enumerate(rows):
        if one is not None:
            found[row]["status"] = 1
            found[row]["block_xxh3"], found[row]["generation"], found[row]["last_used_s"] = one
    return found


def chosen(before: Sequence[Answer], after: Sequence[Answer], blocks: int = 1) -> list[list[int]]:
    return [rows.tolist() for rows in choose_recalled(before, after, [OURS] * blocks, K)]


HELD = answer((OURS, 1, 100))
ABSENT = answer(None)


def test_every_node_gives_up_its_shard_when_fewer_than_k_have_one() -> None:
    nodes: list[Answer] = [HELD, HELD, HELD, ABSENT, ABSENT, ABSENT]
    assert chosen(nodes, nodes) == [[0], [0], [0], [], [], []]


def test_nothing_is_given_up_when_k_nodes_have_the_version_by_then() -> None:
    before: list[Answer] = [HELD, HELD, HELD, ABSENT, ABSENT, ABSENT]
    after: list[Answer] = [HELD, HELD, HELD, HELD, ABSENT, ABSENT]
    assert chosen(before, after) == [[]] * 6


def test_silent_nodes_count_as_nodes_that_have_it() -> None:
    nodes: list[Answer] = [HELD, HELD, HELD, None, ABSENT, ABSENT]
    assert chosen(nodes, nodes) == [[]] * 6
    nodes = [HELD, HELD, None, ABSENT, ABSENT, ABSENT]
    assert chosen(nodes, nodes) == [[0], [0], [], [], [], []]


def test_node_that_was_silent_before_keeps_what_it_has() -> None:
    after: list[Answer] = [HELD, HELD, ABSENT, ABSENT, ABSENT, ABSENT]
    assert chosen([None, *after[1:]], after) == [[], [0], [], [], [], []]


@pytest.mark.parametrize("later", [(OURS, 2, 100), (OURS, 1, 101), (THEIRS, 1, 100)])
def test_shard_that_was_written_or_used_meanwhile_stays(later: tuple[int, int, int]) -> None:
    before: list[Answer] = [HELD, HELD, ABSENT, ABSENT, ABSENT, ABSENT]
    assert chosen(before, [answer(later), *before[1:]])[:2] == [[], [0]]


def test_blocks_of_one_batch_are_judged_one_by_one() -> None:
    mine, none = (OURS, 1, 100), None
    nodes: list[Answer] = [answer(mine, mine), answer(mine, mine), answer(mine, mine)]
    nodes += [answer(mine, none), answer(none, none), answer(none, none)]
    assert chosen(nodes, nodes, blocks=2) == [[1], [1], [1], [], [], []]


async def test_oldest_batches_are_given_up_when_too_many_wait(dial: Dial, closed_port: int) -> None:
    channel = dial(closed_port)
    recalls = Recalls(asyncio.get_running_loop())
    batch = RefusedBatch(keys=[bytes(32)], versions=[OURS], channels=[channel], k=K)
    recalls.add(batch)
    (first,) = recalls.tasks
    for _ in range(BATCHES_MAX + 3):
        recalls.add(batch)
    assert len(recalls.tasks) == BATCHES_MAX
    assert first not in recalls.tasks
    await recalls.end()
    assert not recalls.tasks
    assert first.cancelled()
    recalls.add(batch)
    assert not recalls.tasks
