"""A target's folder that is removed, replaced or moved while its node serves it."""

import logging
import os
import random
import shutil
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.node.server import ServerSettings
from kvstore.wire import Op, WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.raw_client import keys_of, make_shards
from tests.kvstore.node.served_node import served_node
from tests.patience import wait_until

SHARD_BYTES = 500


@pytest.mark.parametrize("is_replaced", [False, True])
def test_node_stores_nothing_more_when_a_folder_was_removed_or_replaced(
    tmp_path: Path,
    rng: random.Random,
    caplog: pytest.LogCaptureFixture,
    is_replaced: bool,
) -> None:
    folder = tmp_path / "t"
    settings = ServerSettings(look_interval_s=0.05, check_s=0.02)
    with served_node(folder, settings=settings) as served, served.client() as client:
        target = served.node.targets[0]
        shards = make_shards(rng, 5, SHARD_BYTES)
        client.write(shards)
        assert not target.describe()["is_lost"]
        # The old folder keeps its inodes, so that none of the new files can get one of them.
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        moved = tmp_path / "moved"
        os.rename(folder, moved)
        if is_replaced:
            os.rename(copy, folder)
        wait_until(lambda: target.is_lost)
        assert target.describe()["is_lost"]
        assert client.write(make_shards(rng, 2, SHARD_BYTES)) == [WriteOutcome.FAILED] * 2
        assert client.match(keys_of(shards)) == [False] * 5
        assert client.read(keys_of(shards), SHARD_BYTES) == [None] * 5
        served.server.request_stop()
    lines = [line for line in caplog.records if line.levelno >= logging.ERROR]
    assert len(lines) == 1
    assert "target lost" in lines[0].getMessage()


def test_target_is_served_again_when_its_folder_is_back(tmp_path: Path, rng: random.Random) -> None:
    settings = ServerSettings(look_interval_s=0.05, check_s=0.02)
    with served_node(tmp_path / "t", settings=settings) as served, served.client() as client:
        target = served.node.targets[0]
        shards = make_shards(rng, 5, SHARD_BYTES)
        client.write(shards)
        os.rename(tmp_path / "t", tmp_path / "away")
        wait_until(lambda: target.is_lost)
        os.rename(tmp_path / "away", tmp_path / "t")
        wait_until(lambda: not target.is_lost)
        assert client.match(keys_of(shards)) == [True] * 5
        assert client.write(make_shards(rng, 2, SHARD_BYTES)) == [WriteOutcome.STORED] * 2


def test_lost_target_answers_every_request_as_an_empty_one_does(
    tmp_path: Path, rng: random.Random
) -> None:
    empty, lost = DrivenNode(tmp_path / "empty"), DrivenNode(tmp_path / "lost")
    keys = keys_of(shards := make_shards(rng, 11, SHARD_BYTES))
    lost.write(shards)
    lost.target.note_place("it is gone")
    joined = wire.join_keys(keys)
    reports = b"".join(key + bytes(8) for key in keys)
    late, expired = bytes([255] * 4), bytes([1, 0, 0, 0])
    withdrawals = b"".join(key + bytes(8) + late + expired for key in keys)
    evictions = b"".join(
        location.to_bytes(8, "little") + bytes(8) + late + expired
        for location in lost.target.index.find(keys)
    )
    for op, body in (
        (Op.MATCH, joined),
        (Op.LOCATE, joined),
        (Op.READ, wire.pack_read(keys, SHARD_BYTES)),
        (Op.READ, wire.pack_read_heads(keys, SHARD_BYTES)),
        (Op.READ, wire.pack_read_heads(keys, 0)),
        (Op.FORGET, joined),
        (Op.REPORT, reports),
        (Op.EVICT, evictions),
        (Op.WITHDRAW, withdrawals),
        (Op.TOUCH, b"".join(key + late + bytes(4) for key in keys)),
        (Op.SCAN, wire.pack_scan(0, 0, 100)),
    ):
        count = 0 if op is Op.SCAN else 11
        answers = [node.ask(op, body, count) for node in (empty, lost)]
        assert answers[0] == answers[1], op
        with pytest.raises(wire.FrameError):
            lost.ask(op, body[:-1], count)
    empty.close()
    lost.close()
