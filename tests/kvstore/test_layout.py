"""Layouts: sections, fingerprints, padding."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erasure import code
from kvstore.errors import InvalidArgument, StoreError
from kvstore.layout import (
    BLOCK_BYTES_MAX,
    SHARDS_MAX,
    BlockLayout,
    Section,
    padded_bytes,
    shard_bytes,
)

FLASH = BlockLayout(
    sections=(
        Section("L2", 22784),
        Section("L8", 22784),
        Section("L14", 22784),
        Section("L20", 45568),
    )
)


def test_layout_is_as_long_as_its_sections() -> None:
    assert FLASH.block_bytes == 113_920


def test_shard_borders_are_layer_borders_for_the_flash_layout_and_ten_data_shards() -> None:
    shard = shard_bytes(FLASH.block_bytes, 10)
    assert shard == 11_392
    assert [section.bytes // shard for section in FLASH.sections] == [2, 2, 2, 4]
    assert all(section.bytes % shard == 0 for section in FLASH.sections)


def test_layouts_are_equal_when_their_sections_are() -> None:
    again = BlockLayout(sections=[Section(s.name, s.bytes) for s in FLASH.sections])  # type: ignore[arg-type]
    assert again == FLASH
    assert hash(again) == hash(FLASH)
    assert pickle.loads(pickle.dumps(FLASH)).fingerprint == FLASH.fingerprint


@pytest.mark.parametrize(
    "sections",
    [
        (("a", 1024), ("b", 2048)),
        (("b", 2048), ("a", 1024)),
        (("a", 2048), ("b", 1024)),
        (("a", 3072),),
        (("b", 3072),),
    ],
)
def test_fingerprint_tells_order_names_and_sizes_apart(
    sections: tuple[tuple[str, int], ...],
) -> None:
    one = BlockLayout(sections=(Section("a", 1024), Section("b", 2048), Section("c", 64)))
    other = BlockLayout(sections=tuple(Section(*s) for s in sections))
    assert other.fingerprint != one.fingerprint
    assert len(other.fingerprint) == 32


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("", 64),
        ("x" * 65, 64),
        ("\ud800", 64),
        (b"L2", 64),
        ("L2", 0),
        ("L2", -1),
        ("L2", True),
        ("L2", 64.0),
        ("L2", "64"),
        ("L2", None),
        ("L2", BLOCK_BYTES_MAX + 1),
    ],
)
def test_section_is_refused_when_name_or_size_breaks_a_rule(name: object, size: object) -> None:
    with pytest.raises(InvalidArgument, match="expected"):
        Section(name, size)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(1023,), (512, 511), (BLOCK_BYTES_MAX, 1)])
def test_layout_is_refused_when_a_block_is_too_small_or_too_large(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"1024 to 16777216"):
        BlockLayout(sections=tuple(Section(f"s{i}", size) for i, size in enumerate(sizes)))


def test_layout_takes_the_smallest_and_the_largest_block() -> None:
    assert BlockLayout(sections=(Section("s", 1024),)).block_bytes == 1024
    assert BlockLayout(sections=(Section("s", BLOCK_BYTES_MAX),)).block_bytes == 16 * 2**20


@pytest.mark.parametrize("sections", [(), None, 5, "ab", (("L2", 2048),)])
def test_layout_is_refused_when_sections_are_not_sections(sections: object) -> None:
    with pytest.raises(InvalidArgument, match="Section"):
        BlockLayout(sections=sections)  # type: ignore[arg-type]


def test_layout_is_refused_when_two_sections_have_one_name() -> None:
    with pytest.raises(InvalidArgument, match="'L2'") as caught:
        BlockLayout(sections=(Section("L2", 1024), Section("L2", 2048), Section("L3", 1)))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, StoreError)


def test_layout_is_refused_when_it_has_too_many_sections() -> None:
    sections = tuple(Section(f"s{i}", 1) for i in range(1025))
    with pytest.raises(InvalidArgument, match="1025"):
        BlockLayout(sections=sections)
    assert BlockLayout(sections=sections[:1024]).block_bytes == 1024


@given(st.integers(1, BLOCK_BYTES_MAX), st.integers(1, 32))
def test_padding_is_the_smallest_multiple_that_holds_the_block(block_bytes: int, k: int) -> None:
    padded = padded_bytes(block_bytes, k)
    assert padded % (k * 64) == 0
    assert block_bytes <= padded < block_bytes + k * 64
    assert shard_bytes(block_bytes, k) * k == padded
    assert shard_bytes(block_bytes, k) % 64 == 0


@pytest.mark.parametrize(
    ("block_bytes", "k"),
    [(0, 10), (-64, 10), (BLOCK_BYTES_MAX + 1, 10), (1.5, 10), (64, 0), (64, 33), (64, True)],
)
def test_padding_is_refused_when_a_number_is_out_of_range(block_bytes: object, k: object) -> None:
    with pytest.raises(InvalidArgument, match="expected a whole number"):
        padded_bytes(block_bytes, k)  # type: ignore[arg-type]


def test_a_block_may_have_as_many_shards_as_the_erasure_code_allows() -> None:
    # Two constants, because layouts are pure and the code's module is not.
    assert SHARDS_MAX == code.SHARDS_MAX
