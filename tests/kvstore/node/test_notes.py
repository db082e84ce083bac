"""NOTE: what clients tell is added up, or refused as a whole; nothing grows without bound."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.histogram import LATENCY_BOUNDS_S
from kvstore.node.notes import NAMESPACES_MAX, ClientNotes
from kvstore.node.statistics import OTHER_NAME
from kvstore.wire import NOTE_BYTES_MAX, Op, Status
from tests.kvstore.node.driven_node import DrivenNode

BUCKETS = len(LATENCY_BOUNDS_S) + 1


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t")
    yield node
    node.close()


def tell(driven: DrivenNode, note: object) -> Status:
    body = note if isinstance(note, bytes) else json.dumps(note).encode()
    return driven.ask(Op.NOTE, body, len(body)).status


def test_notes_are_added_up_by_namespace(driven: DrivenNode) -> None:
    counts = [0] * BUCKETS
    counts[3] = 2
    note = {
        "namespaces": {
            "a": {"matched_tokens": 256, "hit_tokens": 128, "miss_tokens": {"deadline": 128}},
            "b": {"miss_tokens": {"not_stored": 1280}},
        },
        "latency": {"match": {"counts": counts, "sum_s": 0.5}, "decode": {"counts": counts}},
    }
    assert tell(driven, note) is Status.OK
    assert tell(driven, note) is Status.OK
    assert tell(driven, {}) is Status.OK
    found = driven.stat()
    nothing = {"not_stored": 0, "too_few_shards": 0, "rejected": 0, "deadline": 0}
    assert found["namespaces"] == {
        "a": {
            **{"matched_tokens": 512, "hit_tokens": 256},
            "miss_tokens": {**nothing, "deadline": 256},
        },
        "b": {
            **{"matched_tokens": 0, "hit_tokens": 0},
            "miss_tokens": {**nothing, "not_stored": 2560},
        },
    }
    latency = found["client_latency"]
    assert set(latency) == {"match", "fetch", "decode"}
    assert latency["match"]["counts"] == latency["decode"]["counts"] == [2 * n for n in counts]
    assert latency["match"]["sum_s"] == 1.0
    assert sum(latency["fetch"]["counts"]) == 0


BAD_NOTES: list[Any] = [
    b"",
    b"{",
    b"\xff",
    b"[" * 10_000,
    [],
    {"other": {}},
    {"namespaces": []},
    {"latency": 1},
    {"namespaces": {"a": []}},
    {"namespaces": {"a": {"tokens": 1}}},
    {"namespaces": {"a": {"hit_tokens": -1}}},
    {"namespaces": {"a": {"hit_tokens": True}}},
    {"namespaces": {"a": {"hit_tokens": 1.5}}},
    {"namespaces": {"a": {"hit_tokens": 1 << 54}}},
    {"namespaces": {"a": {"miss_tokens": {"bad luck": 1}}}},
    {"namespaces": {"a": {"miss_tokens": [1]}}},
    {"namespaces": {"a" * 65: {}}},
    {"namespaces": {"a\nb": {}}},
    {"namespaces": {"\ud800": {}}},
    {"latency": {"sleep": {"counts": [0] * BUCKETS}}},
    {"latency": {"match": {"counts": [0] * (BUCKETS - 1)}}},
    {"latency": {"match": {"counts": [0] * BUCKETS, "sum_s": -1}}},
]


@pytest.mark.parametrize("note", BAD_NOTES)
def test_note_is_refused_whole_when_a_part_of_it_is_wrong(driven: DrivenNode, note: object) -> None:
    before = driven.stat()
    assert tell(driven, note) is Status.BAD_REQUEST
    good = {"good": {"hit_tokens": 1}}
    if isinstance(note, dict) and isinstance(note.get("namespaces", {}), dict):
        assert tell(driven, {**note, "namespaces": {**good, **note.get("namespaces", {})}}) is (
            Status.BAD_REQUEST
        )
    after = driven.stat()
    assert after["namespaces"] == before["namespaces"] == {}
    assert after["client_latency"] == before["client_latency"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["namespaces", "latency", "a", "hit_tokens", "miss_tokens", "match"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.one_of(JSON_VALUES.map(lambda value: json.dumps(value).encode()), st.binary()))
def test_any_bytes_are_a_note_or_a_value_error(document: bytes) -> None:
    notes = ClientNotes()
    before = notes.describe()
    try:
        notes.add(document)
    except ValueError:
        assert notes.describe() == before
    json.dumps(notes.describe()).encode()


def test_namespaces_beyond_a_number_are_counted_together(
    driven: DrivenNode, rng: random.Random
) -> None:
    for i in range(3 * NAMESPACES_MAX):
        assert tell(driven, {"namespaces": {f"n{i}": {"hit_tokens": 1}}}) is Status.OK
    found = driven.stat()["namespaces"]
    assert len(found) == NAMESPACES_MAX
    assert sum(one["hit_tokens"] for one in found.values()) == 3 * NAMESPACES_MAX
    assert found[OTHER_NAME]["hit_tokens"] == 2 * NAMESPACES_MAX + 1


def test_longest_note_is_taken(driven: DrivenNode) -> None:
    note = json.dumps({"namespaces": {"a": {"hit_tokens": 1}}}).encode()
    assert tell(driven, note.ljust(NOTE_BYTES_MAX)) is Status.OK
