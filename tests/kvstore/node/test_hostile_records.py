"""Requests of the right length and with any contents, against a node that holds shards.

The node answers each of them, with as many outcomes as there were items, or says what is wrong; it
holds no memory afterwards, and its figures still agree with each other.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.wire import Op, Status
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.raw_client import Shard, keys_of

SIZES = {Op.EVICT: 24, Op.WITHDRAW: 48, Op.TOUCH: 40}
SHARDS = [Shard(bytes([i]) * 32, bytes([i]) * 200, block_index=i) for i in range(8)]
U32, U64 = st.integers(0, 0xFFFF_FFFF), st.integers(0, 0xFFFF_FFFF_FFFF_FFFF)
ANY = settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path_factory.mktemp("records") / "t", segment_bytes=8 << 10)
    yield node
    node.close()


def check_figures(driven: DrivenNode) -> None:
    found = driven.target_stat()
    here = [slot for slot in driven.scan() if slot.status]
    assert found["blocks"] == found["slots_used"] == len(here)
    assert sum(one["blocks"] for one in found["classes"].values()) == len(here)
    assert driven.node.pool.used_bytes == 0


@ANY
@given(op=st.sampled_from(sorted(SIZES)), count=st.integers(0, 12), seed=st.integers(0, 1 << 30))
def test_node_answers_any_records(driven: DrivenNode, op: Op, count: int, seed: int) -> None:
    driven.write(SHARDS)
    body = random.Random(seed).randbytes(count * SIZES[op])
    answer = driven.ask(op, body, count)
    assert answer.status in (Status.OK, Status.BAD_REQUEST)
    if answer.status is Status.OK:
        assert len(answer.body) == count
    check_figures(driven)


@ANY
@given(
    items=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 9), st.integers(0, 1 << 25), U64), U64, U32, st.integers(1, 3)
        ),
        max_size=20,
    ),
    is_right=st.booleans(),
)
def test_node_answers_any_eviction(
    driven: DrivenNode, items: list[tuple[int, int, int, int]], is_right: bool
) -> None:
    driven.write(SHARDS)
    if is_right:
        held = {slot.location: slot.generation for slot in driven.scan() if slot.status}
        items = [(at, held.get(at, was), until_s, why) for at, was, until_s, why in items]
    outcomes = driven.evict(items)
    assert len(outcomes) == len(items)
    check_figures(driven)


@ANY
@given(
    keys=st.lists(st.sampled_from([*keys_of(SHARDS), bytes(32), b"\xff" * 32]), max_size=20),
    version=st.sampled_from([0, 1, 2]),
    until_s=U32,
    used_s=U32,
)
def test_node_answers_any_withdrawal_and_touch(
    driven: DrivenNode, keys: list[bytes], version: int, until_s: int, used_s: int
) -> None:
    driven.write(SHARDS)
    assert len(driven.touch([(key, used_s) for key in keys])) == len(keys)
    assert len(driven.withdraw([(key, version, until_s, 1) for key in keys])) == len(keys)
    check_figures(driven)


@ANY
@given(segment=U32, first_slot=U32, slots_max=st.one_of(st.integers(0, 70_000), U32))
def test_node_answers_any_scan(
    driven: DrivenNode, segment: int, first_slot: int, slots_max: int
) -> None:
    answer = driven.ask(Op.SCAN, wire.pack_scan(segment, first_slot, slots_max))
    if not 0 < slots_max <= wire.SCAN_SLOTS_MAX:
        assert answer.status is Status.BAD_REQUEST
        return
    head = wire.parse_scan_head(answer.body)
    rows = np.frombuffer(answer.payloads[-1], wire.SCAN_ROW)
    assert len(rows) == head.slots <= slots_max
    assert driven.node.pool.used_bytes == 0


@ANY
@given(document=st.binary(max_size=400), op=st.sampled_from([Op.POLICY, Op.NOTE]))
def test_node_answers_any_document(driven: DrivenNode, document: bytes, op: Op) -> None:
    answer = driven.ask(op, document, len(document))
    assert answer.status is (Status.BAD_REQUEST if document or op is Op.NOTE else Status.OK)


@pytest.mark.parametrize("op", [Op.SCAN, Op.EVICT, Op.WITHDRAW, Op.TOUCH, Op.POLICY, Op.NOTE])
def test_request_with_a_body_of_another_length_is_no_frame(driven: DrivenNode, op: Op) -> None:
    with pytest.raises(wire.FrameError, match=op.name):
        driven.ask(op, bytes(7), 3)
