"""A running node follows its cluster map, as far as it can without being started again."""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.cluster.entities import ClusterMap, Node
from kvstore.cluster.map import load_cluster_map, write_cluster_map
from kvstore.cluster.source import FileMapSource
from kvstore.node.map_follower import (
    LOOK_INTERVAL_S,
    LOOKS_MAX,
    MapFollower,
    plan_map_change,
)
from kvstore.wire import Op, Status
from tests.kvstore.node.driven_node import EPOCH, IDENTITY, DrivenNode
from tests.kvstore.node.node_process import NodeProcess, write_map
from tests.kvstore.node.raw_client import keys_of, make_shards

SHARD_BYTES = 500


@pytest.fixture
def process(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(write_map(tmp_path, targets=2)) as node:
        yield node


def change_map(path: Path, change: Callable[[ClusterMap], ClusterMap]) -> None:
    old = load_cluster_map(path)
    write_cluster_map(replace(change(old), epoch=old.epoch + 1), path)


def test_node_serves_the_new_epoch_when_a_peer_has_it(
    process: NodeProcess, rng: random.Random
) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES)
    with process.client() as old, process.client(is_greeted=False) as new:
        old.write(shards)
        change_map(process.map_path, lambda it: it)
        # Nobody has asked with it yet.
        assert old.match(keys_of(shards)) == [True] * 3
        new.epoch = 2
        assert new.hello().status is Status.OK
        assert None not in new.read(keys_of(shards), SHARD_BYTES)
        refused = old.ask(Op.MATCH, body=wire.join_keys(keys_of(shards)), count=3)
        assert (refused.status, refused.headers[0].epoch) == (Status.STALE_EPOCH, 2)
        # The peer is still known by its greeting.
        old.epoch = 2
        assert old.match(keys_of(shards)) == [True] * 3
    assert "epoch 2 follows 1" in process.log()


def test_node_serves_a_write_that_brings_the_new_epoch(
    process: NodeProcess, rng: random.Random
) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES)
    with process.client() as client:
        change_map(process.map_path, lambda it: it)
        client.epoch = 2
        assert client.write(shards) == [wire.WriteOutcome.STORED] * 3
        assert client.match(keys_of(shards)) == [True] * 3


def test_node_knows_its_targets_by_their_new_numbers(
    process: NodeProcess, rng: random.Random
) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES)
    with process.client() as client:
        client.write(shards)
        change_map(process.map_path, lambda it: replace(it, targets=it.targets[::-1]))
        client.epoch, client.target_number = 2, 1
        assert client.match(keys_of(shards)) == [True] * 3
        # What was t01 is t02 now, which this connection did not greet.
        client.target_number = 0
        assert client.ask(Op.MATCH).status is Status.NOT_GREETED


def test_target_has_more_room_when_the_new_map_says_so(process: NodeProcess) -> None:
    def grow(it: ClusterMap) -> ClusterMap:
        first = replace(it.targets[0], size_bytes=96 << 20)
        return replace(it, targets=(first, *it.targets[1:]))

    with process.client() as client:
        assert client.target_stat()["capacity_bytes"] == 64 << 20
        change_map(process.map_path, grow)
        client.epoch = 2
        assert client.target_stat()["capacity_bytes"] == 96 << 20
    assert "started again" not in process.log()


def test_node_serves_what_it_has_when_it_must_be_started_again(
    process: NodeProcess, rng: random.Random
) -> None:
    def take_away(it: ClusterMap) -> ClusterMap:
        return replace(it, targets=it.targets[:1], groups=it.groups[:1])

    shards = make_shards(rng, 3, SHARD_BYTES)
    with process.client() as client:
        client.write(shards)
        change_map(process.map_path, take_away)
        client.epoch = 2
        assert client.match(keys_of(shards)) == [True] * 3
    log = process.log()
    assert log.count("must be started again") == 1
    assert "target t02 was taken away" in log
    assert process.stop() == 0


def test_node_keeps_its_map_when_the_new_one_is_broken(process: NodeProcess) -> None:
    with process.client() as client, process.client() as other:
        good = process.map_path.read_text()
        process.map_path.write_text("epoch = ")
        other.epoch = 2
        assert other.ask(Op.MATCH).status is Status.STALE_EPOCH
        assert client.match([]) == []
        process.map_path.write_text(good)
        client.match([])
    assert process.log().count("the old one stays") == 1


class CountingSource(FileMapSource):
    """A map in a file, and how often it was looked at."""

    looks = 0

    def has_changed(self) -> bool:
        self.looks += 1
        return super().has_changed()


class FollowingNode:
    """A node without a process that follows a map in a file; its clock stands still."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = CountingSource(self.write_map(EPOCH))
        self.driven = DrivenNode(folder / "t01")
        self.clock = self.driven.clock
        follower = MapFollower(self.source, self.source.load(), "n01", self.clock)
        self.driven.node.follower = follower

    def write_map(self, epoch: int) -> Path:
        return write_map(self.folder, cluster=IDENTITY.cluster.hex(), epoch=epoch)

    def ask(self, epoch: int) -> Status:
        return self.driven.run(self.driven.begin(Op.MATCH, epoch=epoch)).status


@pytest.fixture
def following(tmp_path: Path) -> Iterator[FollowingNode]:
    node = FollowingNode(tmp_path)
    yield node
    node.driven.close()


def test_map_is_looked_at_once_a_second_for_one_epoch(following: FollowingNode) -> None:
    assert [following.ask(EPOCH + 1) for _ in range(5)] == [Status.STALE_EPOCH] * 5
    assert following.source.looks == 1
    following.write_map(EPOCH + 1)
    assert following.ask(EPOCH + 1) is Status.STALE_EPOCH
    following.clock.advance(LOOK_INTERVAL_S)
    assert following.ask(EPOCH + 1) is Status.OK
    assert following.source.looks == 2


def test_map_that_changes_again_and_again_is_followed_without_a_pause(
    following: FollowingNode,
) -> None:
    """A node that had looked a moment ago refused who came with the next map, and seemed dead."""
    for epoch in range(EPOCH + 1, EPOCH + 5):
        following.write_map(epoch)
        assert following.ask(epoch) is Status.OK
    assert following.source.looks == 4


def test_older_epoch_is_refused_without_a_look(following: FollowingNode) -> None:
    assert following.ask(EPOCH - 1) is Status.STALE_EPOCH
    assert following.source.looks == 0


def test_peer_that_names_ever_higher_epochs_costs_a_bounded_number_of_looks(
    following: FollowingNode,
) -> None:
    for epoch in range(EPOCH + 2, EPOCH + 102):
        assert following.ask(epoch) is Status.STALE_EPOCH
    assert following.source.looks == LOOKS_MAX
    following.clock.advance(LOOK_INTERVAL_S)
    following.write_map(EPOCH + 1)
    assert following.ask(EPOCH + 1) is Status.OK


def test_peer_that_names_an_epoch_without_measure_hides_no_later_one(
    following: FollowingNode,
) -> None:
    assert following.ask(2**32 - 1) is Status.STALE_EPOCH
    following.write_map(EPOCH + 1)
    assert following.ask(EPOCH + 1) is Status.OK


def test_change_names_everything_that_needs_a_new_start(tmp_path: Path) -> None:
    old = load_cluster_map(write_map(tmp_path, targets=3))
    first, _, third = old.targets
    new = replace(
        old,
        epoch=2,
        nodes=(Node(name="n01", address="127.0.0.1:2"),),
        targets=(
            replace(third, path="elsewhere"),
            replace(first, size_bytes=1 << 20),
            replace(first, name="t04", path="t04"),
        ),
    )
    change = plan_map_change(old, new, "n01")
    assert change.target_by_number == {0: "t03", 1: "t01"}
    assert change.restart_reasons == (
        "target t02 was taken away",
        "target t04 was added",
        "its address is 127.0.0.1:2 now",
        "target t03 lies at elsewhere now",
        "target t01 became smaller",
    )
    assert change.capacity_bytes == {}


def test_old_map_stays_when_the_node_is_not_in_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = FileMapSource(write_map(tmp_path, cluster=IDENTITY.cluster.hex(), epoch=EPOCH))
    old = source.load()
    driven = DrivenNode(tmp_path / "t01")
    follower = MapFollower(source, old, "n01", driven.clock)
    new = replace(
        old,
        epoch=EPOCH + 1,
        nodes=(replace(old.nodes[0], name="n02"),),
        targets=(replace(old.targets[0], node="n02"),),
    )
    with caplog.at_level(logging.ERROR):
        assert follower.follow(new, driven.node.targets) is driven.node.targets
    assert follower.current is old
    assert "not in the map" in caplog.text
    driven.close()
