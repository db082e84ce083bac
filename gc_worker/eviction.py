"""The eviction loop: looks at each own target, plans what has to go, and has it go, batch by batch.

When it looks. Every second, and more often while a target fills up fast, the node's STAT says
whether a target is above its high watermark or refuses writers; then the target's slots are looked
at, and otherwise the limits that only the system knows are compared every `scan_interval_s`. For
the TTL the slots are looked at when the first shard can have expired, as found by the look before,
at most every `ttl_interval_s`. Looking at 10^7 slots takes the node about a second of its time, so
after a long look at a target the next one for want of room waits for ten times as long, or for as
long only if writers are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from kvstore.cluster.entities import Target
from kvstore.errors import NodeError
from kvstore.node.container_memory import SYSTEM
from kvstore.retention import RetentionPolicy
from kvstore.retention_rules import CHAT_CLASS
from kvstore.wire import EvictReason

from .ages import note_ages
from .batch_eviction import BatchEviction, StepHook, no_hook
from .clock_guard import ClockGuard, ClockState
from .columns import scan_columns
from .context import WorkerContext
from .cramped import CRAMPED_LOOKS, plan_segment_eviction
from .filling import TICK_MIN_S, TICK_S, choose_tick_s, note_filling
from .pacing import TokenBucket
from .peer_clocks import PeerClocks
from .peers import Withdrawals
from .plan import (
    BUCKET_S,
    NEVER_S,
    EvictionRules,
    choose_bucket_s,
    find_next_expiry_s,
    plan_eviction,
)
from .space_left import read_space_left
from .target_look import TargetLook, TargetState, last_uses_of_victims, room_wanted
from .usage import Usage, choose_usage, read_slot_limits
from .victims import BATCH_VICTIMS_MAX, reason_name

log = logging.getLogger(__name__)

POLICY_WAIT_S = 5.0
"""A worker that has just started is told its policy within two seconds, if its node is up."""
FOLDER_RETRY_S = 30.0
"""After the journal of a target could not be written, the target is left alone for so long."""
LOOK_RESTS = 10
"""After a look at a target's slots for want of room, the next one waits so many times as long."""
REFUSED_LOOK_RESTS = 1
"""The same while writers are refused."""
LOOK_AGAIN_TTLS = 10
"""A shard that a repair brought may be older than all others: look at least every so many
`ttl_interval_s`, whenever the next expiry seemed to be."""


@dataclass(slots=True)
class Eviction:
    """Eviction on the targets of one node. One pass at a time, whoever asks for it."""

    context: WorkerContext
    on_step: StepHook = no_hook
    bucket_s: int = BUCKET_S
    guard: ClockGuard = field(default_factory=ClockGuard)
    is_clock_compared: bool = True
    """Whether blocks expire only while most peers' clocks agree with the own one."""
    _tick_s: float = TICK_S
    _states: dict[str, TargetState] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _dry_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _peer_clocks: PeerClocks = field(init=False)
    _withdrawals: Withdrawals = field(init=False)
    _slots: TokenBucket = field(init=False)
    _bytes: TokenBucket = field(init=False)

    def __post_init__(self) -> None:
        self._peer_clocks = PeerClocks(self.context)
        self._withdrawals = Withdrawals(self.context)
        self._slots = self._make_bucket("evict_slots_per_s")
        self._bytes = self._make_bucket("evict_bytes_per_s")

    def _make_bucket(self, setting: str) -> TokenBucket:
        context = self.context
        return TokenBucket(
            lambda: context.number(setting) * context.traffic.rate_factor,
            clock=context.clock.monotonic_s,
            sleep=context.sleep,
        )

    async def run(self) -> None:
        """Looks and evicts for ever, once the policy is known. Raises NodeError when the own node
        does not answer."""
        await self.context.policy_known.wait()
        while True:
            if self.context.policy_changed.is_set():
                self.context.policy_changed.clear()
                self._look_soon()
            await self.tick()
            await self.context.sleep(self._tick_s)

    def _look_soon(self) -> None:
        """With another policy other shards expire, and the watermarks are elsewhere."""
        for state in self._states.values():
            state.room_look_at_s = state.ttl_look_at_s = 0.0

    async def tick(self) -> None:
        """One round over all targets: what is due is done."""
        async with self._turn:
            clock = await self._look_at_clocks()
            if clock is not ClockState.JUMPED:
                await self._look_at_targets(clock, is_forced=False)
            await self._withdrawals.send_owed()
            self.context.backlog["owed_withdrawals"] = self._withdrawals.owed_items

    async def run_now(self) -> dict[str, int]:
        """Look at all targets now and evict what the policy demands; shards that went, by reason.

        Raises NodeError, also as long as nobody has told what the policy is.
        """
        await self._require_policy()
        async with self._turn:
            before = Counter(self.context.counters.evicted)
            await self._look_at_targets(await self._look_at_clocks(), is_forced=True)
            gone = Counter(self.context.counters.evicted) - before
            return {reason.name.lower(): gone[reason.name.lower()] for reason in EvictReason}

    async def _require_policy(self) -> None:
        try:
            async with asyncio.timeout(POLICY_WAIT_S):
                await self.context.policy_known.wait()
        except TimeoutError:
            raise NodeError(self.context.node, "has not told its policy yet") from None

    async def plan_now(self, policy: RetentionPolicy) -> list[TargetLook]:
        """What would go from each target now under `policy`; changes nothing. Raises NodeError."""
        # One at a time: the columns of 10^7 slots take 300 MB.
        async with self._dry_turn:
            stat = await self.context.link.statistics(self.context.node)
            return [
                await self._look(target, found, policy, is_refusing=False)
                for target, found in self._targets(stat)
            ]

    # One round ----------------------------------------------------------------------------------

    async def _look_at_clocks(self) -> ClockState:
        found = self._look_at_clock()
        is_even = found is ClockState.EVEN
        if is_even and self.is_clock_compared and not await self._peer_clocks.agree():
            return ClockState.SETTLING
        return found

    def _look_at_clock(self) -> ClockState:
        clock, counters = self.context.clock, self.context.counters
        found = self.guard.look(monotonic_s=clock.monotonic_s(), unix_s=clock.unix_ns() / 1e9)
        if found is ClockState.JUMPED:
            counters.clock_jumps += 1
            counters.passes_skipped += 1
            moved_s = round(self.guard.last_jump_s)
            self.context.events.add(self.context.now_s(), "clock_jumped", moved_s=moved_s)
            log.warning("the clock moved by %d s: this pass is left out", moved_s)
        return found

    async def _look_at_targets(self, clock: ClockState, *, is_forced: bool) -> None:
        # What fails at one target, such as a disk that hangs, must not keep the others waiting.
        failures = await self._resume_all(is_forced=is_forced)
        stat = await self.context.link.statistics(self.context.node)
        ticks_s = [TICK_S]
        for target, found in self._targets(stat):
            state = self._states.setdefault(target.name, TargetState())
            is_refusing = self._note_refusals(state, stat, found)
            if found.get("is_lost"):
                state.is_settled = False  # it may come back with a batch in flight
            if not state.is_settled:
                # The journal of a batch in flight must not be replaced by the next one's.
                continue
            now_s = self.context.clock.monotonic_s()
            if now_s < state.rest_until_s and not is_forced:
                continue
            ticks_s.append(TICK_MIN_S if is_refusing else self._choose_tick(state, found, now_s))
            is_ttl_due = is_forced or now_s >= state.ttl_look_at_s
            try:
                if is_ttl_due or self._is_room_look_due(state, found, is_refusing, now_s):
                    await self._look_and_evict(
                        target, found, state, clock, is_ttl_due=is_ttl_due, is_refusing=is_refusing
                    )
            except NodeError as error:  # before the next: some of them are OSErrors too
                failures.append(error)
            except OSError as error:
                self._rest(target, state, error)
        self._tick_s = min(ticks_s)
        if failures:
            raise failures[0]

    def _choose_tick(self, state: TargetState, found: Mapping[str, Any], now_s: float) -> float:
        (limit,) = read_slot_limits(found, is_refusing=False)
        state.filling = note_filling(state.filling, at_s=now_s, used_bytes=limit.used)
        return choose_tick_s(state.filling, room_bytes=limit.room)

    def _targets(self, stat: Mapping[str, Any]) -> list[tuple[Target, Mapping[str, Any]]]:
        """The own targets in the map that the node serves, each with its STAT."""
        stats = {found["name"]: found for found in stat["targets"]}
        return [
            (target, stats[target.name])
            for target in self.context.own_targets()
            if target.name in stats
        ]

    def _note_refusals(
        self, state: TargetState, stat: Mapping[str, Any], found: Mapping[str, Any]
    ) -> bool:
        """Whether writers were refused for want of room since the last round."""
        before, state.refusals = state.refusals, int(found.get("full_refusals", 0))
        # A draining node refuses too, and has room. A number that fell is that of a new process.
        is_draining = bool(stat.get("draining"))
        return before is not None and state.refusals > before and not is_draining

    def _is_room_look_due(
        self, state: TargetState, found: Mapping[str, Any], is_refusing: bool, now_s: float
    ) -> bool:
        rests = REFUSED_LOOK_RESTS if is_refusing else LOOK_RESTS
        if now_s < state.looked_at_s + state.look_took_s * (1 + rests):
            return False
        high = self.context.policy.watermarks.high
        is_full = any(
            limit.fraction > high for limit in read_slot_limits(found, is_refusing=is_refusing)
        )
        return is_full or is_refusing or now_s >= state.room_look_at_s

    async def _resume_all(self, *, is_forced: bool) -> list[NodeError]:
        """Finish batches that are in flight, before it is asked how full the targets are; what went
        wrong at whose targets."""
        failures: list[NodeError] = []
        for target in self.context.own_targets():
            state = self._states.setdefault(target.name, TargetState())
            is_resting = self.context.clock.monotonic_s() < state.rest_until_s
            if state.is_settled or (is_resting and not is_forced):
                continue
            try:
                await self._resume(target)
                state.is_settled = True
            except NodeError as error:  # before the next: some of them are OSErrors too
                failures.append(error)
            except OSError as error:
                self._rest(target, state, error)
        return failures

    def _rest(self, target: Target, state: TargetState, error: OSError) -> None:
        """The target's folder fails us: leave it alone for a while."""
        state.rest_until_s = self.context.clock.monotonic_s() + FOLDER_RETRY_S
        log.error("cannot evict target=%s: %s", target.name, error)

    async def _resume(self, target: Target) -> None:
        batch = self._batch(target)
        try:
            count = await batch.resume()
        finally:
            batch.close()
        if count:
            self.context.events.add(
                self.context.now_s(), "eviction_resumed", target=target.name, victims=count
            )

    def _batch(self, target: Target) -> BatchEviction:
        folder = self.context.folder(target)
        return BatchEviction(self.context, target.name, folder, self._withdrawals, self.on_step)

    # One look -----------------------------------------------------------------------------------

    async def _look_and_evict(
        self,
        target: Target,
        found: Mapping[str, Any],
        state: TargetState,
        clock: ClockState,
        *,
        is_ttl_due: bool,
        is_refusing: bool,
    ) -> None:
        context = self.context
        begun_s = context.clock.monotonic_s()
        state.room_look_at_s = begun_s + context.number("scan_interval_s")
        usage = await self._measure(target, found, is_refusing=is_refusing)
        context.usage[target.name] = usage
        is_room_wanted = bool(room_wanted(usage, context.policy))
        if is_room_wanted or is_refusing:
            state.cramped_looks = 0 if is_room_wanted else state.cramped_looks + 1
        is_cramped = state.cramped_looks >= CRAMPED_LOOKS
        if not (is_ttl_due or is_room_wanted or is_cramped):
            return
        rules = self._rules(context.policy, clock)
        look = await self._scan_and_plan(target, found, usage, context.policy, rules)
        if is_cramped:
            state.cramped_looks = 0
            look = await self._empty_a_segment(look)
        state.looked_at_s = begun_s
        state.look_took_s = context.clock.monotonic_s() - begun_s
        context.reports["ages"] = await asyncio.to_thread(
            note_ages, context.reports.get("ages"), target.name, look.columns, now_s=look.now_s
        )
        # From here on a batch may be in flight, however this pass ends.
        state.is_settled = False
        gone = await self._evict(look)
        state.is_settled = True
        await self._plan_next_ttl_look(state, look, clock)
        if gone:
            context.usage[target.name] = await self._measure_again(target, usage)
            log.info(
                "evicted target=%s shards=%d of=%d fill=%.3f decided_by=%s",
                target.name,
                gone,
                len(look.plan),
                usage.fraction,
                usage.decided_by,
            )

    async def _look(
        self,
        target: Target,
        found: Mapping[str, Any],
        policy: RetentionPolicy,
        *,
        is_refusing: bool,
    ) -> TargetLook:
        usage = await self._measure(target, found, is_refusing=is_refusing)
        rules = self._rules(policy, ClockState.EVEN)
        return await self._scan_and_plan(target, found, usage, policy, rules)

    async def _measure(
        self, target: Target, found: Mapping[str, Any], *, is_refusing: bool
    ) -> Usage:
        space = await asyncio.to_thread(read_space_left, self.context.folder(target), SYSTEM)
        return choose_usage(found, space, is_refusing=is_refusing)

    async def _measure_again(self, target: Target, before: Usage) -> Usage:
        """How full a target is after an eviction; `before` if the node no longer serves it."""
        stat = await self.context.link.statistics(self.context.node)
        for one, found in self._targets(stat):
            if one.name == target.name:
                return await self._measure(target, found, is_refusing=False)
        return before

    def _rules(self, policy: RetentionPolicy, clock: ClockState) -> EvictionRules:
        if clock is ClockState.EVEN:
            return EvictionRules(
                ttl_s=policy.ttl_s, ttl_s_else=policy.ttl_of(CHAT_CLASS), bucket_s=self.bucket_s
            )
        return EvictionRules(ttl_s={}, ttl_s_else=NEVER_S, bucket_s=self.bucket_s)

    async def _scan_and_plan(
        self,
        target: Target,
        found: Mapping[str, Any],
        usage: Usage,
        policy: RetentionPolicy,
        rules: EvictionRules,
    ) -> TargetLook:
        context = self.context
        columns = await scan_columns(
            partial(context.link.scan, target.name), tuple(found.get("ttl_classes", ()))
        )
        context.counters.scans += 1
        context.counters.scanned_slots += len(columns)
        now_s, room = self._now_s(), room_wanted(usage, policy)
        rules = replace(rules, bucket_s=choose_bucket_s(columns, rules, now_s=now_s))
        plan = await asyncio.to_thread(plan_eviction, columns, rules, now_s=now_s, room=room)
        return TargetLook(
            target=target,
            usage=usage,
            columns=columns,
            plan=plan,
            now_s=now_s,
            rules=rules,
            policy=policy,
        )

    async def _empty_a_segment(self, look: TargetLook) -> TargetLook:
        """The look with another plan, unless what has expired is room enough to begin with."""
        if len(look.plan):
            return look
        plan = await asyncio.to_thread(
            plan_segment_eviction, look.columns, now_s=look.now_s, bucket_s=look.rules.bucket_s
        )
        log.info("no room for another slot size target=%s: a segment goes", look.target.name)
        return replace(look, plan=plan)

    def _now_s(self) -> int:
        """Unix time by the clock as it was when the guard looked at it: a jump since then is still
        to be noticed, and nothing may expire by it."""
        if self.guard.offset_s is None:
            return self.context.now_s()
        return int(self.context.clock.monotonic_s() + self.guard.offset_s)

    async def _plan_next_ttl_look(
        self, state: TargetState, look: TargetLook, clock: ClockState
    ) -> None:
        """The next look for the TTL: when the first of the shards that stay can have expired."""
        interval_s = self.context.number("ttl_interval_s")
        now_s = self.context.clock.monotonic_s()
        if look.plan.is_cut or self.context.policy is not look.policy:
            state.ttl_look_at_s = now_s
            return
        wait_s = LOOK_AGAIN_TTLS * interval_s
        if clock is not ClockState.EVEN:
            wait_s = interval_s
        else:
            expiry_s = await asyncio.to_thread(
                find_next_expiry_s, look.columns, look.rules, look.now_s
            )
            if expiry_s is not None:
                wait_s = min(max(expiry_s - look.now_s, interval_s), wait_s)
        state.ttl_look_at_s = now_s + wait_s

    async def _evict(self, look: TargetLook) -> int:
        """Evict what the look planned, at the rates that the policy allows; how many went.

        Stops as soon as the policy is another one: a mistake can be undone while it is at work.
        """
        context, plan = self.context, look.plan
        until_s = last_uses_of_victims(look)
        batch = self._batch(look.target)
        gone = 0
        try:
            for first in range(0, len(plan), BATCH_VICTIMS_MAX):
                chosen = slice(first, first + BATCH_VICTIMS_MAX)
                rows = plan.rows[chosen]
                context.backlog["evict_shards"] = len(plan) - first
                await self._slots.take(len(rows))
                await self._bytes.take(float(look.columns.slot_bytes[rows].sum(dtype=np.int64)))
                if context.policy is not look.policy:
                    break
                gone += await batch.evict(look.columns, rows, plan.reasons[chosen], until_s[chosen])
        finally:
            batch.close()
            context.backlog["evict_shards"] = 0
            self._note_eviction(look, gone)
        return gone

    def _note_eviction(self, look: TargetLook, gone: int) -> None:
        if not gone:
            return
        reasons = Counter(reason_name(reason) for reason in look.plan.reasons.tolist())
        oldest_s = int(look.columns.last_used_s[look.plan.rows].min())
        self.context.events.add(
            self.context.now_s(),
            "evicted",
            target=look.target.name,
            shards=gone,
            planned=dict(reasons),
            oldest_use_age_s=max(look.now_s - oldest_s, 0),
            fill=round(look.usage.fraction, 4),
            decided_by=look.usage.decided_by,
        )
