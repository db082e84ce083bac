"""Shards in, verified blocks out: any k shards of one version, and never a wrong byte."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from erasure.code import Code
from kvstore import wire
from kvstore.client.geometry import Batch, ShardGeometry
from kvstore.client.verify import BlockVerifier


@dataclass
class Stored:
    """Blocks as the cluster would hold them: every shard, its checksum, and the versions."""

    geometry: ShardGeometry
    code: Code
    blocks: NDArray[np.uint8]
    shards: list[list[bytes]]
    versions: list[int]
    keys: list[bytes]


def make_batch(geometry: ShardGeometry, blocks: NDArray[np.uint8]) -> tuple[Batch, object]:
    scratch = np.zeros(max(len(blocks) * geometry.scratch_bytes, 1), np.uint8)
    batch = Batch(
        geometry,
        blocks=[block.data for block in blocks],
        addresses=np.array([block.ctypes.data for block in blocks], np.uintp),
        scratch=scratch.data,
        scratch_address=scratch.ctypes.data,
    )
    return batch, scratch


def store(k: int, m: int, block_bytes: int, count: int, seed: int) -> Stored:
    geometry, code = ShardGeometry(block_bytes, k, m), Code(k, m)
    blocks = np.random.default_rng(seed).integers(0, 256, (count, block_bytes), np.uint8)
    batch, _scratch = make_batch(geometry, blocks.copy())
    batch.spread_tails()
    addresses = batch.shard_addresses
    code.encode_at(
        np.ascontiguousarray(addresses[:, :k]),
        np.ascontiguousarray(addresses[:, k:]),
        shard_bytes=batch.shard_bytes,
    )
    shards = [[bytes(batch.shard_view(b, j)) for j in range(k + m)] for b in range(count)]
    sums = np.array([[xxh3_64_intdigest(s) for s in row] for row in shards], np.uint64)
    keys = [bytes([index]) * 32 for index in range(count)]
    versions = wire.combine_checksums(keys, sums.T[:k].tolist())
    return Stored(geometry, code, blocks, shards, versions, keys)


class Fetched:
    """A batch that shards are delivered into, as the channels would."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.blocks = np.zeros_like(stored.blocks)
        self.batch, self._scratch = make_batch(stored.geometry, self.blocks)
        self.verifier = BlockVerifier(self.batch, stored.keys, stored.code)

    def deliver(self, block: int, shard: int) -> None:
        self._deliver(block, shard, self.stored.shards[block][shard], self.stored.versions[block])

    def deliver_lie(self, block: int, shard: int, *, version: int | None = None) -> None:
        """A shard that matches its own checksum and is not what was stored."""
        wrong = bytes(byte ^ 0x5A for byte in self.stored.shards[block][shard])
        self._deliver(
            block, shard, wrong, self.stored.versions[block] if version is None else version
        )

    def _deliver(self, block: int, shard: int, payload: bytes, version: int) -> None:
        self.batch.shard_view(block, shard)[:] = payload
        self.verifier.on_shards(
            shard, range(block, block + 1), [xxh3_64_intdigest(payload)], [version]
        )


@st.composite
def codes_and_sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    k = draw(st.integers(1, 12))
    return k, draw(st.integers(0, 6)), draw(st.integers(1024, 9000))


@settings(max_examples=60)
@given(codes_and_sizes(), st.integers(1, 4), st.integers(0, 2**32), st.data())
def test_any_k_shards_give_every_block_back(
    shape: tuple[int, int, int], count: int, seed: int, data: st.DataObject
) -> None:
    k, m, block_bytes = shape
    stored = store(k, m, block_bytes, count, seed)
    fetched = Fetched(stored)
    for block in range(count):
        shards = data.draw(st.permutations(range(k + m)))[:k]
        for shard in shards:
            fetched.deliver(block, shard)
    assert fetched.verifier.is_run_decided(coming=m)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == count
    assert np.array_equal(fetched.blocks, stored.blocks)


def test_a_block_with_too_few_shards_ends_the_leading_run() -> None:
    stored = store(4, 2, 4096, 3, seed=1)
    fetched = Fetched(stored)
    for block, shards in ((0, (0, 1, 2, 3)), (1, (0, 1, 5)), (2, (2, 3, 4, 5))):
        for shard in shards:
            fetched.deliver(block, shard)
    assert not fetched.verifier.is_run_decided(coming=1)
    assert fetched.verifier.is_run_decided(coming=0)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 1
    fetched.deliver(1, 2)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 3
    assert np.array_equal(fetched.blocks, stored.blocks)
    assert fetched.verifier.count_decoded(3) == 2


@pytest.mark.parametrize("liar", range(6))
def test_a_shard_that_lies_about_itself_is_found_and_left_out(liar: int) -> None:
    stored = store(4, 2, 5000, 2, seed=2)
    fetched = Fetched(stored)
    for shard in range(6):
        if shard == liar:
            fetched.deliver_lie(1, shard)
        else:
            fetched.deliver(1, shard)
        fetched.deliver(0, shard)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 2
    assert np.array_equal(fetched.blocks, stored.blocks)


def test_the_run_can_grow_while_its_next_block_may_still_get_k_shards() -> None:
    stored = store(4, 2, 5000, 3, seed=8)
    fetched = Fetched(stored)
    for shard in range(4):
        fetched.deliver(0, shard)
        fetched.deliver(2, shard)
    fetched.deliver(1, 0)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 1
    assert fetched.verifier.can_run_grow(coming=3)
    assert not fetched.verifier.can_run_grow(coming=2)
    for shard in (1, 2):
        fetched.deliver(1, shard)
    fetched.deliver_lie(1, 3)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 1
    assert fetched.verifier.can_run_grow(coming=1), "one more shard shows which of them lies"
    fetched.deliver(1, 4)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 3
    assert not fetched.verifier.can_run_grow(coming=2)


def test_a_lie_among_only_k_shards_is_never_delivered() -> None:
    stored = store(4, 2, 5000, 1, seed=3)
    fetched = Fetched(stored)
    for shard in (0, 1, 5):
        fetched.deliver(0, shard)
    fetched.deliver_lie(0, 2)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 0


@pytest.mark.parametrize("other", [0, 2**64 - 1])
def test_shards_of_two_versions_are_never_joined(other: int) -> None:
    stored = store(4, 2, 4096, 1, seed=4)
    fetched = Fetched(stored)
    for shard in (0, 1, 2):
        fetched.deliver(0, shard)
    for shard in (3, 4, 5):
        fetched.deliver_lie(0, shard, version=other)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 0


def test_the_version_of_most_shards_wins() -> None:
    stored = store(4, 2, 4096, 1, seed=5)
    fetched = Fetched(stored)
    fetched.deliver_lie(0, 0, version=77)
    for shard in (1, 2, 3, 4):
        fetched.deliver(0, shard)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 1
    assert np.array_equal(fetched.blocks, stored.blocks)


def test_a_good_shard_is_not_replaced_by_a_later_one() -> None:
    """A second answer for a shard that is there already, with other sums: it changes nothing."""
    stored = store(2, 2, 2048, 2, seed=6)
    fetched = Fetched(stored)
    fetched.deliver(0, 0)
    for shard in (0, 1):
        fetched.deliver(1, shard)
    fetched.verifier.assemble()
    assert fetched.verifier.has_shard(0, 0)
    assert not fetched.verifier.has_shard(0, 1)
    assert fetched.verifier.has_shard(1, 3), "a verified block needs no shard at all"
    fetched.verifier.on_shards(0, range(2), [1, 2], [77, 78])
    fetched.deliver(0, 1)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 2
    assert np.array_equal(fetched.blocks, stored.blocks)


# Blocks of which a part was delivered ---------------------------------------------------------


def pin(fetched: Fetched, block: int) -> None:
    """As a fetch by layers does with a block of which a section was delivered."""
    stored = fetched.stored
    sums = [xxh3_64_intdigest(shard) for shard in stored.shards[block][: stored.code.k]]
    fetched.verifier.pin(block, sums, stored.versions[block])


@settings(max_examples=40)
@given(
    given_shards=st.sets(st.integers(0, 3), min_size=1),
    lying=st.sets(st.integers(0, 5), max_size=2),
    others=st.sets(st.integers(0, 5)),
    pinned_first=st.booleans(),
)
def test_a_pinned_block_is_completed_to_itself_or_not_at_all(
    given_shards: set[int], lying: set[int], others: set[int], pinned_first: bool
) -> None:
    """Whatever arrives of it, before or after: what was delivered stays to the bit."""
    stored = store(4, 2, 4096, 2, seed=3)
    fetched = Fetched(stored)
    for shard in given_shards:
        fetched.deliver(1, shard)
    delivered = {shard: bytes(fetched.batch.shard_view(1, shard)) for shard in given_shards}
    if pinned_first:
        pin(fetched, 1)
    for shard in sorted((lying | others) - given_shards):
        if shard in lying:
            fetched.deliver_lie(1, shard)
        else:
            fetched.deliver_lie(1, shard, version=12345)
    if not pinned_first:
        pin(fetched, 1)
    fetched.verifier.assemble()
    for shard in range(4):
        fetched.deliver(0, shard)
    fetched.verifier.assemble()
    for shard, payload in delivered.items():
        assert bytes(fetched.batch.shard_view(1, shard)) == payload
    if fetched.verifier.leading_blocks == 2:
        assert np.array_equal(fetched.blocks[1], stored.blocks[1])


def test_a_pinned_block_takes_parity_for_what_is_missing_and_leaves_out_what_lies() -> None:
    stored = store(4, 2, 4096, 1, seed=4)
    for lie in (2, 4, 5):
        fetched = Fetched(stored)
        for shard in (0, 1):
            fetched.deliver(0, shard)
        pin(fetched, 0)
        for shard in (2, 3, 4, 5):
            if shard == lie:
                fetched.deliver_lie(0, shard)
            elif (lie, shard) != (4, 2):
                fetched.deliver(0, shard)
        liars = fetched.verifier.assemble()
        assert fetched.verifier.leading_blocks == 1, lie
        assert np.array_equal(fetched.blocks[0], stored.blocks[0])
        assert liars == (lie != 5), lie


def test_a_pinned_block_is_never_completed_in_another_version() -> None:
    stored, other = store(4, 2, 4096, 1, seed=5), store(4, 2, 4096, 1, seed=6)
    fetched = Fetched(stored)
    fetched.deliver(0, 0)
    pin(fetched, 0)
    for shard in range(1, 6):
        payload = other.shards[0][shard]
        fetched.verifier.on_shards(
            shard, range(1), [xxh3_64_intdigest(payload)], [other.versions[0]]
        )
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 0
    assert not fetched.verifier.can_run_grow(coming=0)
    assert bytes(fetched.batch.shard_view(0, 0)) == stored.shards[0][0]


def test_blocks_behind_one_that_is_beyond_help_are_left_until_it_is_not() -> None:
    stored = store(4, 2, 4096, 3, seed=7)
    fetched = Fetched(stored)
    for block in range(3):
        for shard in range(5):
            if shard == 2 or (block, shard) == (1, 3):
                fetched.deliver_lie(block, shard)
            else:
                fetched.deliver(block, shard)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 1
    fetched.deliver(1, 5)
    fetched.verifier.assemble()
    assert fetched.verifier.leading_blocks == 1, "two of its six shards lie"
    again = Fetched(stored)
    for block in range(3):
        for shard in range(5):
            (again.deliver_lie if shard == 2 else again.deliver)(block, shard)
    assert again.verifier.assemble() == 3
    assert again.verifier.leading_blocks == 3
