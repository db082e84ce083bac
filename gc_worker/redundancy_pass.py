"""The redundancy check: goes through all own blocks, hottest first, and sees to what it finds.

    columns by last use -> headers -> who is responsible -> what do all twelve hold
        full            counted
        k or more left  and in use: completed (repair); else left to age
        fewer than k    removed, once a second pass has found the same (orphans)

One loop of the worker. An emptied disk is refilled by this too: its peers find what is missing
there, and bring the hottest blocks back first.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.errors import NodeError

from .context import WorkerContext
from .hottest import BAND_ROWS_MAX
from .orphans import Suspects, remove_unreadable
from .own_blocks import OwnBlocks, find_silent_targets, walk_own_blocks
from .pacing import TokenBucket
from .redundancy import (
    QUIET_S,
    Redundancy,
    RepairRules,
    choose_responsible,
    count_redundancy,
    find_unreadable,
    plan_repair,
)
from .repair import JOB_BYTES_MAX, Repairer, RepairOutcome, closed_targets, plan_jobs
from .survey import Survey, Surveyor

log = logging.getLogger(__name__)

RETRY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyOptions:
    """How the check goes about it. What is worth repairing, and how fast, is policy instead."""

    interval_s: float = 60.0
    """From the end of one pass to the beginning of the next."""
    rows_per_s: float = 10_000.0
    """Own blocks that are looked at in a second; each costs the peers two questions on average."""
    settle_s: int = 30
    """A block of which a shard is younger than this may still be on its way; see RepairRules."""
    quiet_s: int = QUIET_S
    """An unreadable block that was asked for so recently stays for now."""
    confirm_unreadable_s: float = 300.0
    """Between the first and the last time that an unreadable block is found, before it goes."""
    band_rows_max: int = BAND_ROWS_MAX
    job_bytes_max: int = JOB_BYTES_MAX
    """Bytes of data that are rebuilt at a time."""


@dataclass(slots=True)
class RedundancyReport:
    """What one pass of one node found. The sum over all nodes counts each block once.

    `blocks_by_shards[i]`: blocks of which i shards are left on targets that answered, after what
    was repaired in this pass. Only blocks that this node is responsible for are counted.
    """

    number: int
    k: int
    width: int
    started_at_s: int
    duration_s: float = 0.0
    shards_seen: int = 0
    """Own shards looked at, whoever is responsible for their blocks."""
    blocks_by_shards: list[int] = field(default_factory=list)
    due: int = 0
    """Blocks in use that lacked shards."""
    waiting: int = 0
    """Of those, blocks whose missing shards all belong on targets that are silent."""
    repaired_blocks: int = 0
    repaired_shards: int = 0
    refused: int = 0
    failed: int = 0
    unreadable: int = 0
    """Blocks with fewer than k shards although every target answered."""
    removed: int = 0
    """Unreadable blocks of which the rest was removed."""
    misplaced: int = 0
    """Own shards that no map leads to any more."""
    silent_targets: list[str] = field(default_factory=list)

    @property
    def backlog(self) -> int:
        """Blocks in use that still lack shards."""
        return self.due - self.repaired_blocks

    def to_values(self) -> dict[str, Any]:
        """As JSON will show it."""
        names = self.__slots__
        return {**{name: getattr(self, name) for name in names}, "backlog": self.backlog}


async def run(context: WorkerContext, options: RedundancyOptions | None = None) -> None:
    """Pass after pass, until cancelled. Faults of nodes and of the own disk end a pass only."""
    options = options or RedundancyOptions()
    suspects = Suspects(options.confirm_unreadable_s)
    number = 0
    while True:
        number += 1
        try:
            await check_redundancy(context, options, suspects, number)
        except (NodeError, OSError) as error:
            context.counters.node_errors += 1
            log.warning("redundancy check stopped: %s; next one in %.0f s", error, RETRY_S)
            await context.sleep(RETRY_S)
        else:
            await context.sleep(options.interval_s)


async def check_redundancy(
    context: WorkerContext, options: RedundancyOptions, suspects: Suspects, number: int
) -> RedundancyReport:
    """One pass over all own targets; its report also goes to `context.reports`.

    Raises NodeError if the own node does not answer.
    """
    one = _Pass(context, options, suspects, number, await find_silent_targets(context))
    report = await one.run()
    context.counters.redundancy_passes += 1
    context.reports["redundancy"] = report.to_values()
    context.backlog["repair_blocks"] = report.backlog
    if report.repaired_shards or report.removed:
        values = {
            "blocks": report.repaired_blocks,
            "shards": report.repaired_shards,
            "unreadable_removed": report.removed,
        }
        context.events.add(context.now_s(), "repair", **values)
    if report.due or report.unreadable:
        log.info(
            "redundancy pass done lacking=%d repaired=%d refused=%d waiting=%d"
            " unreadable=%d removed=%d",
            report.due,
            report.repaired_blocks,
            report.refused,
            report.waiting,
            report.unreadable,
            report.removed,
        )
    return report


class _Pass:
    def __init__(
        self,
        context: WorkerContext,
        options: RedundancyOptions,
        suspects: Suspects,
        number: int,
        silent: frozenset[str],
    ) -> None:
        cluster_map = context.link.map
        self._context = context
        self._options = options
        self._suspects = suspects
        self._map = cluster_map
        self._surveyor = Surveyor(context.link, silent, clock=context.clock.monotonic_s)
        self._repairer = Repairer(context)
        self._bucket = TokenBucket(
            lambda: options.rows_per_s * context.traffic.rate_factor,
            clock=context.clock.monotonic_s,
            sleep=context.sleep,
        )
        self._report = RedundancyReport(
            number=number,
            k=cluster_map.code.k,
            width=cluster_map.width,
            started_at_s=context.now_s(),
            blocks_by_shards=[0] * (cluster_map.width + 1),
        )

    async def run(self) -> RedundancyReport:
        context, report = self._context, self._report
        begun_s = context.clock.monotonic_s()
        for target in context.own_targets():
            if target.name in self._surveyor.silent:
                continue
            async for blocks in walk_own_blocks(
                context, target, self._bucket, band_rows_max=self._options.band_rows_max
            ):
                await self._check(blocks)
        report.duration_s = round(context.clock.monotonic_s() - begun_s, 3)
        report.silent_targets = sorted(self._surveyor.silent)
        if not report.silent_targets:
            # A pass that could not ask everybody says nothing about what it did not find.
            self._suspects.forget_others(report.number)
        return report

    async def _check(self, blocks: OwnBlocks) -> None:
        report = self._report
        report.shards_seen += len(blocks)
        survey, misplaced = self._surveyor.begin(blocks)
        report.misplaced += misplaced
        survey = survey.take(await self._surveyor.ask_lower(survey))
        if not len(survey):
            return
        await self._surveyor.ask_rest(survey)
        if self._context.link.map is not self._map:
            return  # the numbers of targets are those of the old map; the next step ends the pass
        redundancy = count_redundancy(survey.sightings)
        rules = RepairRules(
            k=report.k,
            now_s=self._context.now_s(),
            hot_within_s=int(self._context.number("hot_within_s")),
            settle_s=self._options.settle_s,
            quiet_s=self._options.quiet_s,
        )
        await self._repair(survey, redundancy, rules)
        await self._remove(survey, redundancy, rules)

    async def _repair(self, survey: Survey, redundancy: Redundancy, rules: RepairRules) -> None:
        report, context = self._report, self._context
        rows = np.arange(len(survey))
        is_best = survey.sightings.versions[rows, survey.own_shard] == redundancy.version
        is_mine = is_best & choose_responsible(survey.sightings, survey.own_shard)
        plan = plan_repair(survey.sightings, redundancy, is_mine, rules)
        names = [target.name for target in self._map.targets]
        jobs = plan_jobs(
            survey,
            redundancy,
            plan,
            names,
            closed=closed_targets(context),
            job_bytes_max=self._options.job_bytes_max,
        )
        report.due += len(plan.rows) + plan.waiting
        report.waiting += plan.waiting
        context.backlog["repair_blocks"] = max(
            context.backlog.get("repair_blocks", 0), report.backlog
        )
        outcome = await self._repairer.run(
            survey, jobs, is_wanted=lambda: context.is_on("repair_is_on")
        )
        self._note_repairs(outcome)
        shards = redundancy.shards.copy()
        repaired = outcome.repaired_rows
        shards[repaired] += plan.missing[repaired].sum(axis=1)
        counts = np.bincount(shards[is_mine], minlength=report.width + 1).tolist()
        for i, count in enumerate(counts):
            report.blocks_by_shards[i] += count

    def _note_repairs(self, outcome: RepairOutcome) -> None:
        report = self._report
        report.repaired_blocks += outcome.blocks
        report.repaired_shards += outcome.shards
        report.refused += outcome.refused
        report.failed += outcome.failed

    async def _remove(self, survey: Survey, redundancy: Redundancy, rules: RepairRules) -> None:
        is_unreadable = find_unreadable(survey.sightings, redundancy, survey.own_shard, rules)
        survey = survey.take(np.flatnonzero(is_unreadable))
        self._report.unreadable += len(survey)
        rows = np.arange(len(survey))
        confirmed = self._suspects.confirm(
            survey.blocks.headers["key"].tolist(),
            survey.sightings.versions[rows, survey.own_shard].tolist(),
            pass_number=self._report.number,
            now_s=self._context.clock.monotonic_s(),
        )
        if any(confirmed) and self._context.link.map is self._map:
            chosen = survey.take(np.flatnonzero(confirmed))
            self._report.removed += await remove_unreadable(self._context, chosen)
