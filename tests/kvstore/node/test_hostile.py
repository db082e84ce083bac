"""Bytes from a peer that means harm, or has a bug: the node closes that connection and goes on.

After each attack the node must serve somebody else, and must hold no more memory than its limits.
"""

import random
import struct
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore import wire
from kvstore.node.request_reader import INBOX_BYTES, RequestReader
from kvstore.wire import Op, Status
from tests.kvstore.node.node_process import NodeProcess, write_map
from tests.kvstore.node.raw_client import RawClient, Shard, make_shards, pack_write
from tests.patience import wait_until

MEMORY_BYTES = 32 << 20
BASE_BYTES = 150 << 20
"""Interpreter, numpy and the index of these tests; measured at 60 MiB."""

U8, U16 = st.integers(0, 0xFF), st.integers(0, 0xFFFF)
U32, U64 = st.integers(0, 0xFFFF_FFFF), st.integers(0, 0xFFFF_FFFF_FFFF_FFFF)
_FIELDS = struct.Struct("<4sBBBBQIIIHHQQQ")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    map_path = write_map(tmp_path_factory.mktemp("hostile"))
    with NodeProcess(map_path, ("--memory", "32MiB", "--segment-size", "4MiB")) as process:
        yield process


@pytest.fixture(scope="module")
def witness(node: NodeProcess) -> Iterator[tuple[RawClient, Shard]]:
    """An honest client and a shard that it stored before any attack."""
    with node.client() as client:
        (shard,) = make_shards(random.Random(1), 1, 11392)
        client.write([shard])
        yield client, shard


def prove_unharmed(node: NodeProcess, witness: tuple[RawClient, Shard]) -> None:
    client, shard = witness
    (found,) = client.read([shard.key], len(shard.payload))
    assert found is not None
    assert found.payload == shard.payload
    with node.client() as newcomer:
        assert newcomer.match([shard.key]) == [True]
    assert node.memory_bytes() < BASE_BYTES + MEMORY_BYTES


def pack_header(
    magic: bytes = wire.MAGIC,
    version: int = wire.VERSION,
    op: int = 2,
    kind: int = 0,
    flags: int = 1,
    count: int = 0,
    status: int = 0,
    target: int = 0,
    epoch: int = 1,
    body_bytes: int = 0,
    payload_bytes: int = 0,
    body_xxh3: int | None = None,
) -> bytes:
    """Any header at all, with a right checksum."""
    body_xxh3 = xxh3_64_intdigest(b"") if body_xxh3 is None else body_xxh3
    head = _FIELDS.pack(
        *(magic, version, op, kind, flags, 7, epoch, 1000, count, status, target),
        *(body_bytes, payload_bytes, body_xxh3),
    )
    return head + struct.pack("<Q", xxh3_64_intdigest(head))


HUGE = 0xFFFF_FFFF_FFFF_FFFF
BAD_STREAMS = {
    "nothing but zeros": bytes(200),
    "another protocol": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n" + bytes(100),
    "another version": pack_header(version=wire.VERSION + 1),
    "wrong header checksum": pack_header()[:-1] + b"\0",
    "unknown operation": pack_header(op=0),
    "operation of the future": pack_header(op=200),
    "a response": pack_header(kind=1),
    "an unfinished request": pack_header(flags=0),
    "a request with a status": pack_header(status=1),
    "a body of 2^64 bytes": pack_header(body_bytes=HUGE),
    "a body of 2^63 bytes": pack_header(body_bytes=1 << 63),
    "a body over its limit": pack_header(body_bytes=(1 << 20) + 1),
    "a body that its count does not explain": pack_header(body_bytes=1 << 20, count=1),
    "a count of 2^32": pack_header(count=0xFFFF_FFFF, body_bytes=(1 << 20) - 32),
    "more keys than allowed": pack_header(count=1025, body_bytes=32 * 1025),
    "keys without a body": pack_header(count=1024),
    "a payload of 2^64 bytes": pack_header(op=5, payload_bytes=HUGE, body_bytes=96),
    "a payload over its limit": pack_header(op=5, payload_bytes=(32 << 20) + 1, body_bytes=96),
    "a wrong body checksum": pack_header(count=1, body_bytes=32, body_xxh3=1) + bytes(32),
    "a greeting in no known letters": pack_header(
        op=1, body_bytes=48, body_xxh3=xxh3_64_intdigest(bytes(16) + b"\xff" * 32)
    )
    + bytes(16)
    + b"\xff" * 32,
    "a greeting of the wrong length": pack_header(op=1, body_bytes=47) + bytes(47),
}


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_connection_is_closed_when_its_peer_sends(
    node: NodeProcess, witness: tuple[RawClient, Shard], name: str
) -> None:
    with node.client() as attacker:
        attacker.send(BAD_STREAMS[name])
        with pytest.raises(ConnectionResetError):
            attacker.receive_frame()
    prove_unharmed(node, witness)


def test_bad_frames_are_logged_one_line_each_and_without_a_traceback(
    node: NodeProcess, witness: tuple[RawClient, Shard]
) -> None:
    time.sleep(1.1)  # the attacks before this one have used up what may be logged in a second
    with node.client() as attacker:
        attacker.send(b"b\r\nd" + bytes(100))
        with pytest.raises(ConnectionResetError):
            attacker.receive_frame()
    wait_until(lambda: r"magic b'b\r\nd', expected" in node.log())
    assert "Traceback" not in node.log()
    prove_unharmed(node, witness)


@pytest.mark.parametrize("sent", [1, 63, 64, 65, 64 + 95, 64 + 96 + 64, 64 + 96 + 64 + 5000])
def test_node_is_unharmed_when_a_write_ends_in_the_middle(
    node: NodeProcess, witness: tuple[RawClient, Shard], sent: int
) -> None:
    with node.client() as leaver:
        shard = Shard(bytes([sent % 256]) * 32, bytes(11392))
        body, payload = pack_write([shard])
        frame = leaver.frame(Op.WRITE, body=body, count=1, payload_bytes=len(payload))
        leaver.send((frame + payload)[:sent])
    prove_unharmed(node, witness)
    assert witness[0].match([shard.key]) == [False]


def test_announced_payloads_take_no_memory_beyond_the_limit(
    node: NodeProcess, witness: tuple[RawClient, Shard]
) -> None:
    # 60 peers announce 8 MiB each, which is 15 times the node's memory, and send almost none of it.
    size = 8 << 20
    body, _ = pack_write([Shard(bytes(32), bytes(size))])
    attackers = [node.client() for _ in range(60)]
    for attacker in attackers:
        attacker.send(attacker.frame(Op.WRITE, body=body, count=1, payload_bytes=size) + b"xyz")
    stat = witness[0].stat()
    assert stat["memory_bytes"] <= stat["memory_limit_bytes"] == MEMORY_BYTES
    assert node.memory_bytes() < BASE_BYTES + MEMORY_BYTES
    for attacker in attackers:
        attacker.close()
    prove_unharmed(node, witness)


def test_announced_bodies_take_little_memory(
    node: NodeProcess, witness: tuple[RawClient, Shard]
) -> None:
    body_bytes = 96 + 64 * 1024
    header = pack_header(op=5, count=1024, body_bytes=body_bytes, payload_bytes=1 << 20)
    before = node.memory_bytes()
    attackers = [node.client() for _ in range(100)]
    for attacker in attackers:
        attacker.send(header + b"x")
    prove_unharmed(node, witness)
    assert node.memory_bytes() - before < 100 * (body_bytes + INBOX_BYTES) * 1.5 + (1 << 20)
    for attacker in attackers:
        attacker.close()


def test_descriptors_are_given_back_when_many_connections_come_and_go(
    node: NodeProcess, witness: tuple[RawClient, Shard]
) -> None:
    prove_unharmed(node, witness)
    before = node.descriptor_count()
    for i in range(300):
        client = node.client(is_greeted=i % 3 == 0)
        client.send(pack_header()[: i % 65])
        client.close()
    prove_unharmed(node, witness)
    assert witness[0].stat()["connections"] <= 2
    assert node.descriptor_count() <= before + 1


# Random frames --------------------------------------------------------------------------------

headers = st.builds(
    pack_header,
    magic=st.sampled_from([wire.MAGIC, b"CHLU", bytes(4)]),
    version=st.sampled_from([wire.VERSION] * 4 + [1, wire.VERSION + 1]),
    op=st.one_of(st.integers(1, 19), U8),
    kind=st.sampled_from([0, 0, 0, 1, 2]),
    flags=st.sampled_from([1, 1, 1, 0, 255]),
    count=st.one_of(st.integers(0, 4), st.integers(0, 1100), U32),
    status=st.sampled_from([0, 0, 0, 9]),
    target=st.sampled_from([0, 0, 1, 65535]),
    epoch=st.sampled_from([1, 1, 2]),
    body_bytes=st.one_of(st.integers(0, 200), st.integers(0, 100_000), U64),
    payload_bytes=st.one_of(st.just(0), st.integers(0, 2000), U64),
    body_xxh3=U64,
)


def pack_fitting(op: Op, count: int, body: bytes, payload: bytes) -> bytes:
    """A frame whose checksums and lengths are right and whose contents are anything."""
    sizes = {
        **{Op.HELLO: (48, 0), Op.READ: (8, 32), Op.WRITE: (96, 64), Op.REPORT: (0, 40)},
        **{Op.STAT: (0, 0), Op.SCAN: (16, 0), Op.EVICT: (0, 24), Op.WITHDRAW: (0, 48)},
        **{Op.TOUCH: (0, 40), Op.POLICY: (0, 1), Op.NOTE: (0, 1)},
        **{Op.ANNOUNCE: (80, 40), Op.WINDOW: (72, 0), Op.RUN: (64, 0), Op.TAKE: (56, 0)},
    }
    fixed, each = sizes.get(op, (0, 32))
    count = count if each else 0
    length = fixed + each * count
    body = (body * (length // max(len(body), 1) + 1))[:length].ljust(length, b"\0")
    return wire.pack_frame(
        op, 0, request_id=9, epoch=1, body=body, count=count, payload_bytes=len(payload)
    )


fitting_frames = st.builds(
    lambda op, count, body, payload: pack_fitting(op, count, body, payload) + payload,
    op=st.sampled_from(Op),
    count=st.integers(0, 6),
    body=st.binary(min_size=1, max_size=100),
    payload=st.one_of(st.just(b""), st.binary(max_size=300)),
)
streams = st.one_of(
    st.binary(max_size=300),
    st.tuples(headers, st.binary(max_size=200)).map(b"".join),
    st.lists(fitting_frames, min_size=1, max_size=3).map(b"".join),
)


@settings(max_examples=1_500, suppress_health_check=list(HealthCheck))
@given(stream=streams, step=st.integers(1, 5000))
def test_reader_gives_requests_or_a_frame_error_for_any_bytes(stream: bytes, step: int) -> None:
    reader = RequestReader()
    at = 0
    try:
        while at < len(stream):
            room = reader.room()
            assert 0 < len(room) <= max(INBOX_BYTES, 96 + 64 * 1024)
            piece = stream[at : at + min(step, len(room))]
            room[: len(piece)] = piece
            reader.received(len(piece))
            at += len(piece)
            while (request := reader.next_request()) is not None:
                header, body = request
                assert len(body) == header.body_bytes
                assert xxh3_64_intdigest(body) == header.body_xxh3
                reader.skip(min(header.payload_bytes, len(reader.waiting())))
    except wire.FrameError:
        return


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(attack=st.lists(streams, min_size=1, max_size=4))
def test_node_survives_random_frames(
    node: NodeProcess, witness: tuple[RawClient, Shard], attack: list[bytes]
) -> None:
    with node.client() as attacker:
        try:
            for stream in attack:
                attacker.send(stream)
        except ConnectionError:
            pass  # closed by an earlier part of the attack, as it should be
    prove_unharmed(node, witness)


@pytest.mark.parametrize("op", Op)
def test_node_answers_or_closes_for_every_frame_that_fits(
    node: NodeProcess, witness: tuple[RawClient, Shard], op: Op
) -> None:
    rng = random.Random(op)
    for _ in range(20):
        payload = rng.randbytes(rng.choice([0, 0, 100]))
        with node.client() as client:
            client.last_id = 9
            client.send(pack_fitting(op, rng.randrange(4), rng.randbytes(90), payload) + payload)
            try:
                assert client.receive_answer().status in Status
            except ConnectionResetError:
                assert op is Op.HELLO  # the only one whose bytes can be no request at all
    prove_unharmed(node, witness)
