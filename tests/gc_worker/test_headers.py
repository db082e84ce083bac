"""Headers are read beside the node, and believed only if they are whole and the ones meant."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gc_worker.headers import GAP_SLOTS_MAX, HeaderReader
from kvstore.node.segment import HEADERS_OFFSET, LOCATION_BITS
from kvstore.node.slot import HEADER_BYTES, SLOT_HEADER, HeaderScratch

SLOTS = 300
SEGMENTS = (0, 7)


def generation_of(number: int, slot: int) -> int:
    return number * 10_000 + slot + 1


def write_segments(folder: Path) -> None:
    """Files with whole headers in all slots, and nothing else that a reader looks at."""
    for number in SEGMENTS:
        scratch = HeaderScratch(SLOTS)
        headers = scratch.repeat(np.zeros(1, SLOT_HEADER), SLOTS)
        headers["generation"] = [generation_of(number, slot) for slot in range(SLOTS)]
        headers["block_index"] = np.arange(SLOTS)
        scratch.seal(SLOTS)
        path = folder / f"segment-{number:06d}.seg"
        path.write_bytes(bytes(HEADERS_OFFSET) + headers.tobytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_segments(folder)
    return folder


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[HeaderReader]:
    write_segments(tmp_path)
    reader = HeaderReader(tmp_path)
    yield reader
    reader.close()


PLACES = st.lists(st.tuples(st.sampled_from(SEGMENTS), st.integers(0, SLOTS - 1)), max_size=60)


@given(PLACES, st.randoms(use_true_random=False))
def test_headers_are_those_of_the_asked_slots_in_any_order(
    folder: Path, places: list[tuple[int, int]], chance: random.Random
) -> None:
    locations = [(number << LOCATION_BITS) | slot for number, slot in places]
    is_meant = [chance.random() < 0.7 for _ in places]
    generations = np.array(
        [generation_of(*p) + (not meant) for p, meant in zip(places, is_meant, strict=True)],
        np.uint64,
    )
    reader = HeaderReader(folder)
    found = reader.read(locations, generations)
    reader.close()
    expected = [row for row, meant in enumerate(is_meant) if meant]
    assert found.rows.tolist() == expected
    assert found.headers["block_index"].tolist() == [places[row][1] for row in expected]


def test_torn_headers_are_left_out(reader: HeaderReader) -> None:
    path = reader.folder / "segment-000000.seg"
    content = bytearray(path.read_bytes())
    content[HEADERS_OFFSET + 5 * HEADER_BYTES + 40] ^= 1
    path.write_bytes(content)
    slots = list(range(4, 7))
    found = reader.read(slots, np.array([generation_of(0, s) for s in slots], np.uint64))
    assert found.rows.tolist() == [0, 2]


def test_slots_behind_the_end_of_a_file_that_was_cut_are_left_out(reader: HeaderReader) -> None:
    path = reader.folder / "segment-000000.seg"
    path.write_bytes(path.read_bytes()[: HEADERS_OFFSET + 10 * HEADER_BYTES + 100])
    slots = [2, 9, 10, 200]
    found = reader.read(slots, np.array([generation_of(0, s) for s in slots], np.uint64))
    assert found.rows.tolist() == [0, 1]


def test_file_that_was_replaced_is_opened_again(reader: HeaderReader) -> None:
    wanted = np.array([generation_of(0, 3)], np.uint64)
    assert len(reader.read([3], wanted).rows) == 1
    (reader.folder / "segment-000000.seg").unlink()
    assert len(reader.read([3], wanted).rows) == 0
    write_segments(reader.folder)
    assert len(reader.read([3], wanted).rows) == 1


def test_missing_segment_has_no_headers(reader: HeaderReader) -> None:
    location = 99 << LOCATION_BITS
    assert len(reader.read([location], np.ones(1, np.uint64)).rows) == 0


def test_gaps_between_slots_are_read_along_only_if_they_are_short() -> None:
    assert (GAP_SLOTS_MAX + 1) * HEADER_BYTES == 4096
