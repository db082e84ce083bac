"""Who may ask a node: cluster, target and epoch, over a real socket."""

import random
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Op, Status
from tests.kvstore.node.raw_client import (
    make_shards,
)
from tests.kvstore.node.served_node import CLUSTER, served_node

SHARD_BYTES = 11392


def test_hello_is_answered_with_the_nodes_own(tmp_path: Path) -> None:
    with served_node(tmp_path) as served, served.client(is_greeted=False) as client:
        answer = client.hello()
        assert answer.status is Status.OK
        assert wire.parse_hello(answer.body) == (CLUSTER, "t01")


def test_first_request_must_be_hello(tmp_path: Path, rng: random.Random) -> None:
    with served_node(tmp_path) as served, served.client(is_greeted=False) as client:
        for op in (Op.MATCH, Op.STAT, Op.LOCATE, Op.EVICT, Op.TOUCH, Op.POLICY, Op.NOTE, Op.LOOKUP):
            assert client.ask(op).status is Status.NOT_GREETED
        assert client.ask_write(make_shards(rng, 2, 100)).status is Status.NOT_GREETED
        assert client.hello().status is Status.OK
        assert client.match([bytes(32)]) == [False]


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("cluster", bytes(16), Status.WRONG_CLUSTER),
        ("target", "t99", Status.WRONG_TARGET),
        ("target_number", 1, Status.WRONG_TARGET),
        ("epoch", 2, Status.STALE_EPOCH),
    ],
)
def test_hello_of_a_stranger_is_refused_and_the_connection_kept(
    tmp_path: Path, field: str, value: object, status: Status
) -> None:
    with served_node(tmp_path) as served, served.client(is_greeted=False) as client:
        right = getattr(client, field)
        setattr(client, field, value)
        answer = client.hello()
        assert answer.status is status
        assert answer.headers[0].epoch == 1
        if status is Status.WRONG_CLUSTER:
            assert wire.parse_hello(answer.body)[0] == CLUSTER
        setattr(client, field, right)
        assert client.ask(Op.STAT).status is Status.NOT_GREETED
        assert client.hello().status is Status.OK


def test_requests_are_refused_when_their_epoch_or_target_is_another(tmp_path: Path) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        answer = client.ask(Op.MATCH, epoch=2)
        assert answer.status is Status.STALE_EPOCH
        assert answer.headers[0].epoch == 1
        assert client.ask(Op.MATCH, target=1).status is Status.NOT_GREETED
        assert client.match([]) == []


def test_payload_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        assert client.ask(Op.MATCH, payload=b"x" * 300_000).status is Status.BAD_REQUEST
        assert client.match([]) == []


def test_requests_to_the_node_itself_need_any_greeted_target(tmp_path: Path) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        note = b"{}"
        for target in (0, 1, 65535):
            assert client.ask(Op.STAT, target=target).status is Status.OK
            assert client.ask(Op.POLICY, target=target).status is Status.OK
            answer = client.ask(Op.NOTE, target=target, body=note, count=len(note))
            assert answer.status is Status.OK
        scan = wire.pack_scan(0, 0, 1)
        assert client.ask(Op.SCAN, target=1, body=scan).status is Status.NOT_GREETED


@pytest.mark.parametrize(
    ("op", "size", "count"),
    [
        (Op.LOOKUP, 64, 2),
        (Op.ANNOUNCE, 80 + 40, 1),
        (Op.WINDOW, 72, 0),
        (Op.RUN, 64, 0),
        (Op.TAKE, 56, 0),
    ],
)
def test_node_refuses_what_is_for_agents_and_serves_on(
    tmp_path: Path, op: Op, size: int, count: int
) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        for _ in range(2):
            answer = client.ask(op, body=bytes(size), count=count)
            assert answer.status is Status.BAD_REQUEST
            assert answer.body.decode() == f"{op.name} is for an agent, and this is a storage node"
        assert client.match([bytes(32)]) == [False]
