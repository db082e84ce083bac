"""Random histories of uses and evictions against a plain dict that knows when each key was used.

The dict is the rule of wire.md in its shortest form: a shard goes if it is the one that is meant
and was not used later than the request says. It shares no code with the node.
"""

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore import wire
from kvstore.wire import EvictOutcome, EvictReason, WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.raw_client import Shard

KEYS = [bytes([i]) * 32 for i in range(16)]
CLASSES = (b"agent", b"chat")
SIZES = (100, 640)

key_sets = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)
unique_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True)
slack_s = st.integers(-30, 30)
reasons = st.sampled_from(EvictReason)


@dataclass
class Held:
    version: int
    used_s: int
    ttl_class: bytes
    size: int


class EvictionMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="eviction-machine-"))
        self.node = DrivenNode(self.folder / "t", segment_bytes=8 << 10)
        self.here: dict[bytes, Held] = {}
        self.evicted: Counter[str] = Counter()

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.close()
            shutil.rmtree(self.folder)

    @property
    def now_s(self) -> int:
        return int(self.node.clock.unix_s)

    def take_out(self, key: bytes, reason: EvictReason) -> None:
        del self.here[key]
        self.evicted[reason.name.lower()] += 1

    @rule(keys=unique_keys, version=st.integers(1, 3), age_s=st.none() | st.integers(-20, 50))
    def write(self, keys: list[bytes], version: int, age_s: int | None) -> None:
        size, ttl_class = SIZES[version % 2], CLASSES[version % 2]
        given_s = 0 if age_s is None else self.now_s - age_s
        shards = [Shard(key, key[:1] * size, version, last_used_s=given_s) for key in keys]
        used_s = min(given_s, self.now_s) if given_s else self.now_s
        for key, outcome in zip(keys, self.node.write(shards, ttl_class=ttl_class), strict=True):
            if outcome is WriteOutcome.STORED:
                self.here[key] = Held(version, used_s, ttl_class, size)
            elif outcome is WriteOutcome.KNOWN:
                self.here[key].used_s = max(self.here[key].used_s, used_s)
            else:
                assert outcome is WriteOutcome.KEPT

    @rule(keys=key_sets, is_use=st.booleans(), size=st.sampled_from(SIZES))
    def read(self, keys: list[bytes], is_use: bool, size: int) -> None:
        body = wire.pack_read(keys, size, is_use=is_use)
        assert self.node.ask(wire.Op.READ, body, len(keys)).status is wire.Status.OK
        for key in keys:
            if is_use and key in self.here and self.here[key].size == size:
                self.here[key].used_s = self.now_s

    @rule(keys=key_sets, ahead_s=st.integers(-50, 50))
    def touch(self, keys: list[bytes], ahead_s: int) -> None:
        given_s = self.now_s + ahead_s
        assert self.node.touch([(key, given_s) for key in keys]) == [
            key in self.here for key in keys
        ]
        for key in keys:
            if key in self.here:
                held = self.here[key]
                held.used_s = max(held.used_s, min(given_s, self.now_s))

    @rule(keys=key_sets, slack=slack_s, is_same=st.booleans(), reason=reasons)
    def evict(self, keys: list[bytes], slack: int, is_same: bool, reason: EvictReason) -> None:
        locations = self.node.target.index.find(keys)
        items = []
        expected: list[EvictOutcome | None] = []
        for key, location in zip(keys, locations, strict=True):
            held = self.here.get(key)
            generation = 1 if location < 0 else self.node.target.generation(location)
            until_s = self.now_s + slack
            items.append((max(location, 0), generation + (not is_same), until_s, reason))
            if held is None:
                # Location 0 is somebody else's, or nobody's, and no generation is 1 or 2.
                expected.append(None)
            elif not is_same:
                expected.append(EvictOutcome.OTHER)
            elif held.used_s > until_s:
                expected.append(EvictOutcome.USED)
            else:
                expected.append(EvictOutcome.EVICTED)
                self.take_out(key, reason)
        for outcome, wanted in zip(self.node.evict(items), expected, strict=True):
            if wanted is None:
                assert outcome in (EvictOutcome.ABSENT, EvictOutcome.OTHER)
            else:
                assert outcome is wanted

    @rule(keys=key_sets, slack=slack_s, version=st.integers(0, 3), reason=reasons)
    def withdraw(self, keys: list[bytes], slack: int, version: int, reason: EvictReason) -> None:
        until_s = self.now_s + slack
        expected = []
        for key in keys:
            held = self.here.get(key)
            if held is None:
                expected.append(EvictOutcome.ABSENT)
            elif version not in (0, held.version):
                expected.append(EvictOutcome.OTHER)
            elif held.used_s > until_s:
                expected.append(EvictOutcome.USED)
            else:
                expected.append(EvictOutcome.EVICTED)
                self.take_out(key, reason)
        assert self.node.withdraw([(key, version, until_s, reason) for key in keys]) == expected

    @rule(seconds=st.sampled_from([1, 9, 40, -20]))
    def time_passes(self, seconds: int) -> None:
        self.node.clock.unix_s += seconds
        self.node.clock.now_s += abs(seconds)

    @invariant()
    def node_holds_what_the_rule_says_and_its_figures_agree(self) -> None:
        if not hasattr(self, "node"):
            return
        rows = self.node.locate(KEYS)
        assert {
            key: (row["block_xxh3"], row["last_used_s"])
            for key, row in zip(KEYS, rows, strict=True)
            if row["status"]
        } == {key: (held.version, held.used_s) for key, held in self.here.items()}
        scanned = [slot for slot in self.node.scan() if slot.status]
        assert {slot.generation for slot in scanned} == {
            row["generation"] for row in rows if row["status"]
        }
        found = self.node.target_stat()
        assert {name: count for name, count in found["evicted"].items() if count} == self.evicted
        assert sum(found["evicted_age"]["counts"]) == self.evicted.total()
        classes = Counter(held.ttl_class.decode() for held in self.here.values())
        assert {name: one["blocks"] for name, one in found["classes"].items()} == classes
        assert sum(one["bytes"] for one in found["classes"].values()) == found["used_bytes"]
        segments = self.node.target.space.segments.values()
        slots = sum(segment.shape.slot_count for segment in segments)
        assert found["slots_free"] == slots - len(self.here)


TestEvictionMachine = EvictionMachine.TestCase
TestEvictionMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
