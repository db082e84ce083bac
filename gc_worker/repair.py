"""Completes blocks that have lost shards: jobs of like blocks are rebuilt, and written as needed.

    choose what is missing (redundancy) -> jobs, hottest first -> bytes are paid for -> rebuild, or
    refuse -> WRITE to the right targets, as used when the block was used last

A repaired shard is not renewed: repair must not keep a block alive that nobody asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import wire
from kvstore.client.router import Lane
from kvstore.client.shards import write_shards
from kvstore.errors import NodeError
from kvstore.event_log import short_key

from .context import WorkerContext
from .pacing import TokenBucket
from .rebuild import Rebuild, RebuildJob
from .redundancy import Redundancy, RepairPlan
from .survey import Survey

log = logging.getLogger(__name__)

JOB_BYTES_MAX = 8 << 20
"""Data shards of one job hold about so many bytes."""
JOB_BLOCKS_MAX = 64
READ_DEADLINE_S = 5.0
WRITE_DEADLINE_S = 5.0
_SHARED_FIELDS = ("namespace_id", "layout", "ttl_class", "k", "m", "block_bytes", "anchor")
_IS_THERE = (wire.WriteOutcome.STORED, wire.WriteOutcome.KNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairJob:
    """Blocks of one span that lack the same shards. `rows` are rows of the survey."""

    rows: NDArray[np.intp]
    targets: tuple[str, ...]
    """Target of each shard, by shard."""
    holders: tuple[int, ...]
    """Shards of the version that is to be completed; the own one first, which costs no network."""
    missing: tuple[int, ...]
    versions: tuple[int, ...]
    last_used_s: NDArray[np.uint32]


@dataclass(slots=True)
class RepairOutcome:
    """What came of some jobs."""

    shards: int = 0
    """Shards that are there now and were not."""
    bytes: int = 0
    blocks: int = 0
    """Blocks of which every shard that was to be written is there."""
    refused: int = 0
    """Blocks given up because what came does not fit their checksums."""
    failed: int = 0
    """Blocks of which too few shards came, or that a target did not take: it is full, or failed."""
    repaired_rows: list[int] = field(default_factory=list)

    def add(self, other: RepairOutcome) -> None:
        """Add what came of others."""
        self.shards += other.shards
        self.bytes += other.bytes
        self.blocks += other.blocks
        self.refused += other.refused
        self.failed += other.failed
        self.repaired_rows += other.repaired_rows


def plan_jobs(
    survey: Survey,
    redundancy: Redundancy,
    plan: RepairPlan,
    target_names: Sequence[str],
    *,
    closed: AbstractSet[str] = frozenset(),
    job_bytes_max: int = JOB_BYTES_MAX,
) -> list[RepairJob]:
    """Jobs for the rows of `plan`; the job with the hottest block first.

    `target_names`: by number. Shards on `closed` targets, which take no writes, are left out.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    headers, sightings = survey.blocks.headers, survey.sightings
    is_closed = np.array([name in closed for name in target_names], np.bool_)
    missing = plan.missing & ~is_closed[survey.places]
    is_holder = sightings.versions == redundancy.version[:, None]
    for row in plan.rows.tolist():
        shared = tuple(headers[name][row].tobytes() for name in _SHARED_FIELDS)
        size = int(headers["payload_bytes"][row])
        key = (shared, size, missing[row].tobytes(), is_holder[row].tobytes())
        groups.setdefault(key, []).append(row)
    jobs: list[RepairJob] = []
    for (_, size, _, _), rows in groups.items():
        shards = np.flatnonzero(missing[rows[0]]).tolist()
        if not shards:
            continue
        own = int(survey.own_shard[rows[0]])
        holders = np.flatnonzero(is_holder[rows[0]]).tolist()
        holders.sort(key=lambda shard, own=own: shard != own)  # type: ignore[misc]
        count = max(1, min(JOB_BLOCKS_MAX, job_bytes_max // (size * int(headers["k"][rows[0]]))))
        for at in range(0, len(rows), count):
            some = np.array(rows[at : at + count], np.intp)
            jobs.append(
                RepairJob(
                    rows=some,
                    targets=tuple(target_names[place] for place in survey.places[rows[0]]),
                    holders=tuple(holders),
                    missing=tuple(shards),
                    versions=tuple(redundancy.version[some].tolist()),
                    last_used_s=plan.last_used_s[some],
                )
            )
    jobs.sort(key=lambda job: -int(job.last_used_s.max()))
    return jobs


def closed_targets(context: WorkerContext) -> frozenset[str]:
    """Targets of nodes that drain: they take no writes."""
    by_node = context.link.map.targets_by_node
    return frozenset(
        target.name for node in context.policy.draining for target in by_node.get(node, ())
    )


class Repairer:
    """Runs jobs, paced by the policy's `repair_bytes_per_s`, slower while the own node is busy.

    One for each pass: a target that was full is not offered anything more in the same pass, since
    reading for it would be in vain.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._full: set[str] = set()
        self._bucket = TokenBucket(
            lambda: context.number("repair_bytes_per_s") * context.traffic.rate_factor,
            clock=context.clock.monotonic_s,
            sleep=context.sleep,
        )

    async def run(
        self, survey: Survey, jobs: Sequence[RepairJob], *, is_wanted: Callable[[], bool]
    ) -> RepairOutcome:
        """Runs the jobs one after the other while `is_wanted` says so."""
        total = RepairOutcome()
        for job in jobs:
            if not is_wanted():
                break
            if self._is_vain(job):
                outcome = RepairOutcome(failed=len(job.rows))
            else:
                outcome = await self._run_one(survey, job)
            total.add(outcome)
            self._count(outcome)
        return total

    def _is_vain(self, job: RepairJob) -> bool:
        """Whether nobody would take what is missing, or the map does not lead there any more."""
        known = self._context.link.map.target_by_name
        is_full = self._full.issuperset(job.targets[shard] for shard in job.missing)
        return is_full or any(name not in known for name in job.targets)

    async def _run_one(self, survey: Survey, job: RepairJob) -> RepairOutcome:
        context, headers = self._context, survey.blocks.headers[job.rows]
        size, code = int(headers["payload_bytes"][0]), context.link.router.code
        await self._bucket.take(len(job.rows) * code.k * size)
        rebuild = Rebuild(
            RebuildJob(
                keys=headers["key"].tolist(),
                versions=job.versions,
                shard_bytes=size,
                channels=[context.link.channel(name) for name in job.targets],
                holders=job.holders,
            ),
            code,
            context.link.loop,
        )
        await rebuild.run(READ_DEADLINE_S)
        outcome = RepairOutcome(refused=rebuild.refused)
        good = np.flatnonzero(rebuild.is_good)
        outcome.failed = len(job.rows) - len(good) - outcome.refused
        if outcome.refused:
            bad = int(np.flatnonzero(~rebuild.is_good)[0])
            log.warning(
                "repair refused blocks=%d first=%s: what the nodes sent does not fit its checksums",
                outcome.refused,
                short_key(headers["key"][bad].tobytes()),
            )
        if len(good):
            await self._write(headers, job, rebuild, good, outcome)
        return outcome

    async def _write(
        self,
        headers: NDArray[Any],
        job: RepairJob,
        rebuild: Rebuild,
        good: NDArray[np.intp],
        outcome: RepairOutcome,
    ) -> None:
        """Write each missing shard of the blocks `good` to its target."""
        is_whole = np.ones(len(good), np.bool_)
        size = rebuild.area.shape[2]
        for shard in job.missing:
            batch, items = pack_write(headers[good], job, rebuild, good, shard)
            try:
                answers = await write_shards(
                    self._context.link.channel(job.targets[shard], Lane.WRITE),
                    batch,
                    items,
                    [rebuild.area[row, shard].data for row in good.tolist()],
                    deadline_s=WRITE_DEADLINE_S,
                    loop=self._context.link.loop,
                )
            except NodeError as error:
                log.info("repair: not written: %s", error)
                is_whole[:] = False
                continue
            if (answers == wire.WriteOutcome.FULL).any():
                self._full.add(job.targets[shard])
            stored = int((answers == wire.WriteOutcome.STORED).sum())
            outcome.shards += stored
            outcome.bytes += stored * size
            is_whole &= np.isin(answers, _IS_THERE)
        outcome.blocks = int(is_whole.sum())
        outcome.failed += len(good) - outcome.blocks
        outcome.repaired_rows = job.rows[good[is_whole]].tolist()

    def _count(self, outcome: RepairOutcome) -> None:
        counters = self._context.counters
        counters.repaired_shards += outcome.shards
        counters.repaired_bytes += outcome.bytes
        counters.repairs_failed += outcome.failed
        counters.repairs_refused += outcome.refused


def pack_write(
    headers: NDArray[Any],
    job: RepairJob,
    rebuild: Rebuild,
    good: NDArray[np.intp],
    shard: int,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """WRITE_BATCH (1,) and WRITE_ITEM (n,) for one shard of the blocks `good` of a job."""
    batch = np.zeros(1, wire.WRITE_BATCH)
    for name in _SHARED_FIELDS:
        batch[name] = headers[name][0]
    batch["shard"] = shard
    batch["shard_bytes"] = rebuild.area.shape[2]
    items = np.zeros(len(good), wire.WRITE_ITEM)
    items["key"] = headers["key"]
    items["block_index"] = headers["block_index"]
    # 0 would mean "now".
    items["last_used_s"] = np.maximum(job.last_used_s[good], 1)
    items["payload_xxh3"] = rebuild.payload_xxh3[good, shard]
    items["block_xxh3"] = np.array(job.versions, np.uint64)[good]
    return batch, items
