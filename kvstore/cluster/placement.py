"""Which targets hold a block: spans of blocks, weighted rendezvous over groups, rotation.

Pure, and the same in every process and language: docs/formats/cluster-map.md has the formula and
vectors. It says where a shard belongs, not whether it is there.
"""

from dataclasses import dataclass

import numpy as np
import xxhash

from .entities import ClusterMap, Group

SPAN_BLOCKS = 64
"""Consecutive blocks of a chain that lie in one group, next to each other on each target."""

GROUP_SEED = 0
ROTATION_SEED = 1

# The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
# OOPSLA 2014, with the constants of Stafford's variant 13).
MIX_A = np.uint64(0xBF58476D1CE4E5B9)
MIX_B = np.uint64(0x94D049BB133111EB)


def rotation(anchor: bytes, width: int) -> int:
    """How far the shards of a span are turned within their group, 0 to width - 1."""
    return xxhash.xxh3_64_intdigest(anchor, seed=ROTATION_SEED) % width


@dataclass(frozen=True, slots=True)
class SpanPlacement:
    """Where the shards of one span lie: shard j on the group's target (j + rotation) mod width."""

    group: Group
    rotation: int

    def targets_by_shard(self) -> tuple[str, ...]:
        """Target names in the order of the shards they hold."""
        targets = self.group.targets
        return targets[self.rotation :] + targets[: self.rotation]


class Placement:
    """Places the spans of one map. Build it once for each map: it hashes the names of all groups.

    Not changed by use, so many threads may share one.
    """

    __slots__ = ("_groups", "_seeds", "_weights", "_width")

    def __init__(self, cluster_map: ClusterMap) -> None:
        self._width = cluster_map.width
        # Sorted, so that a tie goes to the same group whatever the order in the map is.
        self._groups = tuple(sorted(cluster_map.groups, key=lambda group: group.name))
        seeds = [
            xxhash.xxh3_64_intdigest(group.name.encode(), seed=GROUP_SEED) for group in self._groups
        ]
        self._seeds = np.array(seeds, dtype=np.uint64)
        weights = [cluster_map.weight_of(group) for group in self._groups]
        self._weights = np.array(weights, dtype=np.float64)

    def place(self, anchor: bytes) -> SpanPlacement:
        """Group and rotation of the span whose first block has the key `anchor`.

        About 10 us for 100 groups; callers that ask for one span often keep the answer.
        """
        return SpanPlacement(self.choose_group(anchor), rotation(anchor, self._width))

    def choose_group(self, anchor: bytes) -> Group:
        """The group of a span, by weighted rendezvous hashing: the one with the highest score.

        score = weight / -ln(u), with u in (0, 1) drawn by hashing anchor and group name together.
        A group wins with probability weight / sum of weights, and a map that gains or loses a
        group moves only the spans which that group wins or held (Schindelhauer and Schomaker,
        "Weighted Distributed Hash Tables", SPAA 2005: the logarithmic method).
        """
        if len(self._groups) == 1:
            return self._groups[0]
        x = self._seeds ^ np.uint64(xxhash.xxh3_64_intdigest(anchor, seed=GROUP_SEED))
        x = (x ^ (x >> np.uint64(30))) * MIX_A
        x = (x ^ (x >> np.uint64(27))) * MIX_B
        x ^= x >> np.uint64(31)
        # 52 bits and a half: exact in a double, and never 0 nor 1, so the logarithm is neither
        # infinite nor zero.
        u = ((x >> np.uint64(12)) + 0.5) * 2.0**-52
        return self._groups[int(np.argmin(-np.log(u) / self._weights))]
