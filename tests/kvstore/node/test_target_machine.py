"""Random histories of a target against a plain dict, with restarts and kills in between.

The dict says for each key which versions may be here. It shares no code with the node.
"""

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.node.free_runs import FreeRuns
from kvstore.node.segment import LOCATION_BITS
from kvstore.wire import ReportOutcome, WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk, Killed
from tests.kvstore.node.raw_client import Shard

KEYS = [bytes([i]) * 32 for i in range(24)]
SIZES = (100, 640)
CAPACITY_BYTES = 40 << 10
"""Little enough that histories meet a full target, and segments change their slot size."""

key_sets = st.lists(st.sampled_from(KEYS), min_size=1, max_size=10, unique=True)


@dataclass(frozen=True)
class Held:
    payload: bytes
    version: int
    written_s: float


def payload_of(key: bytes, version: int, size: int) -> bytes:
    return random.Random(f"{key.hex()}{version}").randbytes(size)


class TargetMachine(RuleBasedStateMachine):
    """`here` is what must be readable; `maybe` what a kill may have left, by key."""

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="target-machine-"))
        self.disk = FaultyDisk()
        self.node = DrivenNode(
            self.folder / "t",
            disk=self.disk,
            capacity_bytes=CAPACITY_BYTES,
            segment_bytes=8 << 10,
            # So a restart begins with a snapshot, and what follows a kill with the headers.
            snapshot_shards_min=0,
        )
        self.here: dict[bytes, Held] = {}
        self.maybe: dict[bytes, list[Held]] = {}

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.close()
            shutil.rmtree(self.folder)

    def shards(self, keys: list[bytes], version: int, size: int) -> list[Shard]:
        return [Shard(key, payload_of(key, version, size), version) for key in keys]

    def expect(self, key: bytes, version: int) -> set[WriteOutcome]:
        """What a write of this version may be answered, by the rules of wire.md."""
        held = self.here.get(key)
        if held is None:
            return {WriteOutcome.STORED, WriteOutcome.FULL}
        if held.version == version:
            return {WriteOutcome.KNOWN}
        if held.version > version and self.node.clock.unix_s - held.written_s < 10.0:
            return {WriteOutcome.KEPT}
        return {WriteOutcome.STORED, WriteOutcome.FULL}

    # A version has one size, as a block has one layout.
    @rule(keys=key_sets, version=st.integers(1, 4))
    def write(self, keys: list[bytes], version: int) -> None:
        shards = self.shards(keys, version, SIZES[version % 2])
        expected = [self.expect(key, version) for key in keys]
        for shard, outcome, allowed in zip(shards, self.node.write(shards), expected, strict=True):
            assert outcome in allowed
            if outcome is WriteOutcome.STORED:
                now_s = self.node.clock.unix_s
                self.here[shard.key] = Held(shard.payload, version, now_s)

    @rule(keys=key_sets, version=st.integers(1, 4), written_bytes=st.integers(1, 9000))
    def write_and_be_killed(self, keys: list[bytes], version: int, written_bytes: int) -> None:
        shards = self.shards(keys, version, SIZES[version % 2])
        self.disk.write_left = written_bytes
        try:
            outcomes = self.node.write(shards)
        except Killed:
            offered = {shard.key: shard for shard in shards}
            now_s = self.node.clock.unix_s
            for key, shard in offered.items():
                # Unless it would not have been written at all.
                if self.expect(key, version) & {WriteOutcome.STORED}:
                    held = Held(shard.payload, version, now_s)
                    self.maybe.setdefault(key, []).append(held)
        else:
            for shard, outcome in zip(shards, outcomes, strict=True):
                if outcome is WriteOutcome.STORED:
                    now_s = self.node.clock.unix_s
                    self.here[shard.key] = Held(shard.payload, version, now_s)
        self.disk.write_left = None
        self.node.crash()
        self.node.open()
        self.settle()

    def settle(self) -> None:
        """After a kill: each key holds what it held, or what was being written; not nothing."""
        for key, offers in self.maybe.items():
            found = self.find(key)
            before = self.here.get(key)
            possible = [held.payload for held in [*offers, *([before] if before else [])]]
            assert found in possible or (found is None and before is None)
            for held in offers:
                if found == held.payload:
                    self.here[key] = held
        self.maybe.clear()

    def find(self, key: bytes) -> bytes | None:
        found = [self.node.read([key], size)[0] for size in SIZES]
        payloads = [got.payload for got in found if got]
        assert len(payloads) <= 1
        return payloads[0] if payloads else None

    @rule(keys=key_sets)
    def forget(self, keys: list[bytes]) -> None:
        assert self.node.forget(keys) == [key in self.here for key in keys]
        for key in keys:
            self.here.pop(key, None)

    @rule(keys=key_sets, size=st.sampled_from(SIZES))
    def read(self, keys: list[bytes], size: int) -> None:
        for key, got in zip(keys, self.node.read(keys, size), strict=True):
            held = self.here.get(key)
            if held is not None and len(held.payload) == size:
                assert got is not None
                assert (got.payload, got.block_xxh3) == (held.payload, held.version)
            else:
                assert got is None

    @rule(key=st.sampled_from(KEYS))
    def report(self, key: bytes) -> None:
        location = self.node.target.index.get(key)
        if key in self.here:
            generation = self.node.target.generation(location)
            assert self.node.report(key, generation) is ReportOutcome.GOOD
        else:
            assert self.node.report(key, 1) is ReportOutcome.ABSENT

    @rule(seconds=st.sampled_from([0.5, 9.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.node.clock.advance(seconds)

    @rule()
    def restart(self) -> None:
        self.node.close()
        self.node.open()

    @rule()
    def kill(self) -> None:
        self.node.crash()
        self.node.open()

    @invariant()
    def match_says_what_is_here(self) -> None:
        if hasattr(self, "node"):
            assert self.node.match(KEYS) == [key in self.here for key in KEYS]

    @invariant()
    def slots_are_used_or_free_or_quarantined_and_never_two_of_them(self) -> None:
        if not hasattr(self, "node"):
            return
        target = self.node.target
        used = target.index.find(list(self.here))
        free: list[int] = []
        for runs in target.space._free.values():
            assert isinstance(runs, FreeRuns)
            free += [slot for start, count in runs.runs() for slot in range(start, start + count)]
        every = [
            (number << LOCATION_BITS) + slot
            for number, segment in target.space.segments.items()
            for slot in range(segment.shape.slot_count)
        ]
        assert sorted([*used, *free, *target.quarantined]) == sorted(every)
        disk_bytes = sum(path.stat().st_size for path in (self.folder / "t").glob("*.seg"))
        assert disk_bytes <= CAPACITY_BYTES
        assert target.used_bytes == sum(
            target.index.resolve(location)[0].shape.geometry.slot_bytes for location in used
        )


TestTargetMachine = TargetMachine.TestCase
TestTargetMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
