"""How many shards of a block are left, who looks after it, and what is to be done about it.

Pure decisions over columns: what the nodes of its group say of each of n blocks. Asking the nodes
is for `survey`, acting on the answer for `repair` and `orphans`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NS_PER_S = 1_000_000_000
QUIET_S = 2
"""What was used so recently may be used again in the same second, which no condition can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sightings:
    """What is known of n blocks; column j is the target that shard j belongs on.

    `versions`: uint64 (n, width), the block_xxh3 of shard j where that target holds shard j, else
    0. `generations` uint64 and `last_used_s` uint32, both (n, width), belong to the same shards.
    `has_answered`: bool (n, width), whether the target could be asked; a silent one may hold
    anything.
    """

    versions: NDArray[np.uint64]
    generations: NDArray[np.uint64]
    last_used_s: NDArray[np.uint32]
    has_answered: NDArray[np.bool_]

    @staticmethod
    def unknown(count: int, width: int) -> Sightings:
        """Nobody was asked yet."""
        shape = (count, width)
        return Sightings(
            versions=np.zeros(shape, np.uint64),
            generations=np.zeros(shape, np.uint64),
            last_used_s=np.zeros(shape, np.uint32),
            has_answered=np.zeros(shape, np.bool_),
        )

    def take(self, rows: NDArray[np.intp]) -> Sightings:
        """The same of some of the blocks."""
        return Sightings(
            versions=self.versions[rows],
            generations=self.generations[rows],
            last_used_s=self.last_used_s[rows],
            has_answered=self.has_answered[rows],
        )


@dataclass(frozen=True, slots=True)
class Redundancy:
    """Of each block the version that most targets hold, uint64 (n,), and how many do, int64 (n,).

    Of two versions that equally many hold, the larger number: all nodes decide alike.
    """

    version: NDArray[np.uint64]
    shards: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRules:
    """What decides whether a block is repaired. Times in seconds."""

    k: int
    now_s: int
    hot_within_s: int
    settle_s: int
    """A shard that is younger may belong to a save that goes on."""
    quiet_s: int = QUIET_S
    """What was used so recently is not removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """What to write: for each of `rows` (intp, hottest first) the shards `missing[row]`.

    `missing`: bool (n, width). `last_used_s`: uint32 (n,), of the newest holder of the version.
    `waiting`: number of blocks whose missing shards all belong on targets that are silent.
    """

    rows: NDArray[np.intp]
    missing: NDArray[np.bool_]
    last_used_s: NDArray[np.uint32]
    waiting: int


def count_redundancy(sightings: Sightings) -> Redundancy:
    """The version of each block that can best be read, and the number of its shards."""
    versions = sightings.versions
    is_here = versions != 0
    # Pair by pair: width is at most 32, so this is cheaper than sorting each row.
    agreeing = (versions[:, :, None] == versions[:, None, :]) & is_here[:, :, None]
    counts = agreeing.sum(axis=2)
    shards = counts.max(axis=1)
    version = np.where(counts == shards[:, None], versions, np.uint64(0)).max(axis=1)
    return Redundancy(version=version, shards=shards)


def choose_responsible(sightings: Sightings, own_shard: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For which blocks this node, which holds shard `own_shard`, is the one that looks after it.

    That is the reachable node with the lowest shard of the same version, so exactly one of those
    that see the same; when it dies, the next one follows.
    """
    rows = np.arange(len(own_shard))
    own_version = sightings.versions[rows, own_shard]
    first = (sightings.versions == own_version[:, None]).argmax(axis=1)
    responsible: NDArray[np.bool_] = (own_version != 0) & (first == own_shard)
    return responsible


def find_settled(sightings: Sightings, rules: RepairRules) -> NDArray[np.bool_]:
    """Blocks of which no shard was written within `settle_s` of now.

    Generations follow their node's clock, which may be ahead of ours as well as behind; one that is
    far in the future says nothing and does not keep its block from being repaired.
    """
    written_s = (sightings.generations // np.uint64(NS_PER_S)).astype(np.int64)
    is_young = np.abs(written_s - rules.now_s) < rules.settle_s
    settled: NDArray[np.bool_] = ~(is_young & (sightings.versions != 0)).any(axis=1)
    return settled


def newest_use(sightings: Sightings, version: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """When each block was used last, in Unix seconds, by those that hold `version`."""
    is_holder = (sightings.versions == version[:, None]) & (version != 0)[:, None]
    newest: NDArray[np.uint32] = np.where(is_holder, sightings.last_used_s, 0).max(axis=1)
    return newest.astype(np.uint32)


def plan_repair(
    sightings: Sightings, redundancy: Redundancy, is_mine: NDArray[np.bool_], rules: RepairRules
) -> RepairPlan:
    """Which of the blocks that are `mine` get which shards again, hottest first.

    Only a version that k or more targets hold is ever completed, and only if it was used within
    `hot_within_s`. A shard of another version on the right target counts as missing.
    """
    width = sightings.versions.shape[1]
    version = redundancy.version
    newest = newest_use(sightings, version)
    is_hot = newest.astype(np.int64) >= rules.now_s - rules.hot_within_s
    is_incomplete = (redundancy.shards >= rules.k) & (redundancy.shards < width)
    is_due = is_mine & is_incomplete & is_hot & find_settled(sightings, rules)
    missing = sightings.has_answered & (sightings.versions != version[:, None]) & is_due[:, None]
    can_act = missing.any(axis=1)
    rows = np.flatnonzero(can_act)
    order = np.argsort(-newest[rows].astype(np.int64), kind="stable")
    return RepairPlan(
        rows=rows[order],
        missing=missing,
        last_used_s=newest,
        waiting=int((is_due & ~can_act).sum()),
    )


def find_unreadable(
    sightings: Sightings, redundancy: Redundancy, own_shard: NDArray[np.int64], rules: RepairRules
) -> NDArray[np.bool_]:
    """Blocks that this node looks after, of which no version has k shards, as all targets agree.

    While one target is silent no block counts as unreadable, and none that was written or used a
    moment ago: it may be on its way.
    """
    rows = np.arange(len(own_shard))
    newest = newest_use(sightings, sightings.versions[rows, own_shard])
    is_quiet = np.abs(newest.astype(np.int64) - rules.now_s) >= rules.quiet_s
    unreadable: NDArray[np.bool_] = (
        choose_responsible(sightings, own_shard)
        & sightings.has_answered.all(axis=1)
        & (redundancy.shards < rules.k)
        & find_settled(sightings, rules)
        & is_quiet
    )
    return unreadable
