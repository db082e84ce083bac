"""A READ that waits for nothing gives the same answer as the operation, or leaves it to that."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.node.answers import Request
from kvstore.node.operations import Session, plan_at_once
from kvstore.node.read_at_once import COPIED_BYTES_MAX, CopiedAnswer, FileAnswer
from tests.kvstore.node.driven_node import EPOCH, IDENTITY, AnswerParser, DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import Answer, keys_of, make_shards
from tests.kvstore.node.served_node import served_node
from tests.patience import wait_until

SHARD_BYTES = 5000
MANY = COPIED_BYTES_MAX // SHARD_BYTES + 1
"""So many shards are not copied any more."""


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t", disk=FaultyDisk())
    yield node
    node.close()


def plan(
    driven: DrivenNode,
    keys: list[bytes],
    shard_bytes: int = SHARD_BYTES,
    *,
    epoch: int = EPOCH,
    greeted: str = IDENTITY.name,
    left_s: float = 10.0,
    is_use: bool = True,
) -> CopiedAnswer | FileAnswer | None:
    body = wire.pack_read(keys, shard_bytes, is_use=is_use)
    frame = wire.pack_frame(
        wire.Op.READ, wire.KIND_REQUEST, request_id=5, body=body, count=len(keys), epoch=epoch
    )
    request = Request(wire.parse_header(frame), body, driven.clock.monotonic_s() + left_s)
    return plan_at_once(driven.node, Session({greeted}), request)


def sent(driven: DrivenNode, answer: CopiedAnswer | FileAnswer | None) -> Answer:
    """What the peer gets."""
    if isinstance(answer, CopiedAnswer):
        parser = AnswerParser()
        parser.add(answer.views)
        return parser.answer
    assert answer is not None
    return driven.run(answer.hold())


@pytest.mark.parametrize(
    ("count", "kind"), [(1, CopiedAnswer), (MANY - 1, CopiedAnswer), (MANY, FileAnswer)]
)
def test_answer_at_once_is_that_of_the_operation(
    driven: DrivenNode, rng: random.Random, count: int, kind: type
) -> None:
    shards = make_shards(rng, count + 3, SHARD_BYTES)
    driven.write(shards)
    keys = [*keys_of(shards[3:]), *keys_of(shards[:3])][:count]
    statistics = driven.target.statistics
    before = (statistics.reads, statistics.shards_read, statistics.read_bytes)
    answer = plan(driven, keys)
    assert type(answer) is kind
    assert sent(driven, answer) == driven.ask_read(keys, SHARD_BYTES)
    after = (statistics.reads, statistics.shards_read, statistics.read_bytes)
    assert after == tuple(
        b + 2 * a for b, a in zip(before, (1, count, count * SHARD_BYTES), strict=True)
    )


@pytest.mark.parametrize("is_use", [True, False])
def test_answer_at_once_notes_the_use_if_it_is_one(
    driven: DrivenNode, rng: random.Random, is_use: bool
) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards)
    driven.clock.advance(100)
    assert plan(driven, keys_of(shards[1:2]), is_use=is_use) is not None
    assert sum(driven.target.classes.shards_read) == is_use
    now_s = driven.clock.unix_ns() // 1_000_000_000
    used_s = []
    for shard in shards:
        segment, slot = driven.target.index.resolve(driven.target.index.get(shard.key))
        used_s.append(int(segment.columns.last_used_s[slot]))
    assert used_s == [now_s - 100, now_s if is_use else now_s - 100, now_s - 100]


@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, SHARD_BYTES + 1])
def test_heads_at_once_are_those_of_the_operation(
    driven: DrivenNode, rng: random.Random, shard_bytes: int
) -> None:
    shards = make_shards(rng, 20, SHARD_BYTES)
    driven.write(shards[::2])
    body = wire.pack_read_heads(keys_of(shards), shard_bytes)
    frame = wire.pack_frame(
        wire.Op.READ, wire.KIND_REQUEST, request_id=5, body=body, count=20, epoch=EPOCH
    )
    request = Request(wire.parse_header(frame), body, driven.clock.monotonic_s() + 10.0)
    answer = plan_at_once(driven.node, Session({IDENTITY.name}), request)
    assert isinstance(answer, CopiedAnswer)
    assert sent(driven, answer) == driven.ask(wire.Op.READ, body, 20)


@pytest.mark.parametrize("count", [2, MANY])
class TestWhatIsLeftToTheOperation:
    """Nothing is counted, and the operation serves or refuses the request."""

    @pytest.fixture
    def keys(self, driven: DrivenNode, rng: random.Random, count: int) -> list[bytes]:
        shards = make_shards(rng, count, SHARD_BYTES)
        driven.write(shards)
        keys = keys_of(shards)
        assert plan(driven, keys) is not None
        return keys

    @pytest.fixture(autouse=True)
    def nothing_is_counted(self, driven: DrivenNode, keys: list[bytes]) -> Iterator[None]:
        reads = driven.target.statistics.reads
        yield
        assert driven.target.statistics.reads == reads

    def test_a_shard_that_is_not_here(
        self, driven: DrivenNode, keys: list[bytes], rng: random.Random
    ) -> None:
        assert plan(driven, [*keys, rng.randbytes(32)]) is None

    def test_shards_of_another_size(self, driven: DrivenNode, keys: list[bytes]) -> None:
        for shard_bytes in (SHARD_BYTES - 1, 0, wire.PAYLOAD_BYTES_MAX, 0xFFFFFFFF):
            assert plan(driven, keys, shard_bytes) is None

    def test_no_key_at_all(self, driven: DrivenNode, keys: list[bytes]) -> None:
        assert plan(driven, []) is None

    def test_shards_that_are_not_in_memory(self, driven: DrivenNode, keys: list[bytes]) -> None:
        assert isinstance(driven.disk, FaultyDisk)
        driven.disk.has_cache = False
        assert plan(driven, keys) is None

    def test_a_file_that_could_not_be_sent_before(
        self, driven: DrivenNode, keys: list[bytes]
    ) -> None:
        for segment in driven.target.space.segments.values():
            segment.is_suspect = True
        assert plan(driven, keys) is None

    def test_a_target_that_is_lost(self, driven: DrivenNode, keys: list[bytes]) -> None:
        driven.target.is_lost = True
        assert plan(driven, keys) is None

    def test_a_request_to_be_refused(self, driven: DrivenNode, keys: list[bytes]) -> None:
        assert plan(driven, keys, epoch=EPOCH + 1) is None
        assert plan(driven, keys, greeted="t02") is None
        assert plan(driven, keys, left_s=-0.001) is None


def test_peer_that_reads_late_gets_every_byte(tmp_path: Path, rng: random.Random) -> None:
    """Answers that the socket does not take whole are sent on, copied ones and those from files."""
    with served_node(tmp_path) as served, served.client() as client:
        shards = make_shards(rng, MANY, SHARD_BYTES)
        client.write(shards)
        counts = [MANY - 1, MANY, 1] * 80
        for count in counts:
            body = wire.pack_read(keys_of(shards[:count]), SHARD_BYTES)
            client.send(client.frame(wire.Op.READ, body=body, count=count))
        for count in counts:
            answer = client.receive_answer()
            assert answer.status is wire.Status.OK
            assert answer.payloads == [b"".join(shard.payload for shard in shards[:count])]
        segments = served.node.targets[0].space.segments.values()
        wait_until(lambda: not any(segment.pins for segment in segments))
