"""Drain: makes sure that every block of the own node can be read without it, and says when.

A node that drains takes no writes (the policy says so to all). Its worker goes through its blocks:
those of which fewer than k shards lie on other nodes, none of which drains too, are completed
there. When none is left, the node can be stopped for good.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import NodeError

from .context import WorkerContext
from .own_blocks import OwnBlocks, find_silent_targets, walk_own_blocks
from .pacing import TokenBucket
from .redundancy import Redundancy, RepairPlan, Sightings, count_redundancy, newest_use
from .repair import Repairer, closed_targets, plan_jobs
from .survey import Surveyor

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""How often the policy is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOptions:
    """How draining goes about it; repairs are paced by policy."""

    interval_s: float = 30.0
    """From the end of one pass to the beginning of the next."""
    rows_per_s: float = 10_000.0
    look_s: float = LOOK_S


@dataclass(slots=True)
class DrainReport:
    """How far it is. While a pass runs, `is_running` is true and the numbers grow."""

    node: str
    started_at_s: int
    is_running: bool = True
    duration_s: float = 0.0
    blocks_total: int = 0
    """Blocks of which the node holds a shard, when the pass began."""
    checked: int = 0
    safe: int = 0
    """Blocks that can be read without this node, after what was repaired."""
    at_risk: int = 0
    """Blocks that could not be read without this node."""
    unreadable: int = 0
    """Blocks that cannot be read with it either; they hold nothing up."""
    misplaced: int = 0
    """Shards that no map leads to; they hold nothing up."""
    repaired_blocks: int = 0
    repaired_shards: int = 0
    silent_targets: list[str] = field(default_factory=list)
    is_safe_to_stop: bool = False

    def to_values(self) -> dict[str, Any]:
        """As JSON will show it."""
        return {name: getattr(self, name) for name in self.__slots__}


def count_elsewhere(
    sightings: Sightings, redundancy: Redundancy, is_leaving: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Shards of the best version of each block on targets that stay, int64 (n,).

    `is_leaving`: bool (n, width), targets that drain.
    """
    stays = (sightings.versions == redundancy.version[:, None]) & ~is_leaving
    counts: NDArray[np.int64] = (stays & (redundancy.version != 0)[:, None]).sum(axis=1)
    return counts


def plan_drain(
    sightings: Sightings, redundancy: Redundancy, is_leaving: NDArray[np.bool_], k: int
) -> RepairPlan:
    """Completes, on the targets that stay, every block that has fewer than k shards there.

    However old it is: what is stored is to survive the node, and ages by the policy afterwards.
    """
    elsewhere = count_elsewhere(sightings, redundancy, is_leaving)
    is_due = (elsewhere < k) & (redundancy.shards >= k)
    missing = sightings.has_answered & (sightings.versions != redundancy.version[:, None])
    missing &= ~is_leaving & is_due[:, None]
    newest = newest_use(sightings, redundancy.version)
    can_act = missing.any(axis=1)
    rows = np.flatnonzero(can_act)
    return RepairPlan(
        rows=rows[np.argsort(-newest[rows].astype(np.int64), kind="stable")],
        missing=missing,
        last_used_s=newest,
        waiting=int((is_due & ~can_act).sum()),
    )


async def run(context: WorkerContext, options: DrainOptions | None = None) -> None:
    """While the policy says that the own node drains: pass after pass, until cancelled."""
    options = options or DrainOptions()
    while True:
        if context.node not in context.policy.draining:
            context.reports.pop("drain", None)
            await context.sleep(options.look_s)
            continue
        try:
            report = await drain_once(context, options)
        except (NodeError, OSError) as error:
            context.counters.node_errors += 1
            log.warning("drain stopped: %s; it goes on in %.0f s", error, options.look_s)
            await context.sleep(options.look_s)
        else:
            log.info(
                "drain pass done blocks=%d at_risk=%d safe_to_stop=%s",
                report.checked,
                report.at_risk,
                report.is_safe_to_stop,
            )
            await _rest(context, options)


async def _rest(context: WorkerContext, options: DrainOptions) -> None:
    """Waits for the next pass, or until the node drains no more."""
    end_s = context.clock.monotonic_s() + options.interval_s
    while context.node in context.policy.draining and context.clock.monotonic_s() < end_s:
        await context.sleep(options.look_s)


async def drain_once(context: WorkerContext, options: DrainOptions) -> DrainReport:
    """One pass; its report also goes to `context.reports`, while it grows.

    Raises NodeError if the own node does not answer.
    """
    stat = await context.link.statistics(context.node)
    silent = await find_silent_targets(context)
    one = _DrainPass(context, options, silent)
    rows = stat.get("targets", [])
    one.report.blocks_total = sum(int(row.get("blocks", 0)) for row in rows)
    return await one.run(is_closed=bool(stat.get("draining")))


class _DrainPass:
    def __init__(
        self, context: WorkerContext, options: DrainOptions, silent: frozenset[str]
    ) -> None:
        self._context = context
        self._surveyor = Surveyor(context.link, silent, clock=context.clock.monotonic_s)
        self._repairer = Repairer(context)
        self._names = [target.name for target in context.link.map.targets]
        leaving = closed_targets(context) | {target.name for target in context.own_targets()}
        self._is_leaving = np.array([name in leaving for name in self._names], np.bool_)
        self._bucket = TokenBucket(
            lambda: options.rows_per_s * context.traffic.rate_factor,
            clock=context.clock.monotonic_s,
            sleep=context.sleep,
        )
        self.report = DrainReport(node=context.node, started_at_s=context.now_s())

    async def run(self, *, is_closed: bool) -> DrainReport:
        """`is_closed`: the node takes no writes any more, so nothing comes behind the pass."""
        context, report = self._context, self.report
        begun_s = context.clock.monotonic_s()
        for target in context.own_targets():
            async for blocks in walk_own_blocks(context, target, self._bucket):
                await self._check(blocks)
                context.reports["drain"] = report.to_values()
        report.is_running = False
        report.duration_s = round(context.clock.monotonic_s() - begun_s, 3)
        report.silent_targets = sorted(self._surveyor.silent)
        report.is_safe_to_stop = is_closed and report.at_risk == 0
        context.reports["drain"] = report.to_values()
        return report

    async def _check(self, blocks: OwnBlocks) -> None:
        report, k = self.report, self._context.link.router.code.k
        survey, misplaced = self._surveyor.begin(blocks)
        report.misplaced += misplaced
        report.checked += len(blocks)
        await self._surveyor.ask_rest(survey)
        redundancy = count_redundancy(survey.sightings)
        is_leaving = self._is_leaving[survey.places]
        plan = plan_drain(survey.sightings, redundancy, is_leaving, k)
        jobs = plan_jobs(survey, redundancy, plan, self._names)
        outcome = await self._repairer.run(
            survey, jobs, is_wanted=lambda: self._context.node in self._context.policy.draining
        )
        report.repaired_blocks += outcome.blocks
        report.repaired_shards += outcome.shards
        elsewhere = count_elsewhere(survey.sightings, redundancy, is_leaving)
        repaired = outcome.repaired_rows
        elsewhere[repaired] += plan.missing[repaired].sum(axis=1)
        is_readable = redundancy.shards >= k
        # With targets silent nobody knows whether the rest is there.
        is_lost = ~is_readable & survey.sightings.has_answered.all(axis=1)
        is_safe = elsewhere >= k
        report.safe += int(is_safe.sum())
        report.unreadable += int((is_lost & ~is_safe).sum())
        report.at_risk += int((~is_safe & ~is_lost).sum())
