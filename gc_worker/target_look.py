"""What the eviction loop knows of one target: what it remembers, and what one look found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.cluster.entities import Target
from kvstore.retention import RetentionPolicy
from kvstore.wire import EvictReason

from .columns import TargetColumns
from .filling import Filling
from .plan import NEVER_S, EvictionPlan, EvictionRules, Room
from .usage import Usage, plan_room


@dataclass(slots=True)
class TargetState:
    """What the loop remembers of one target. Times are of the monotonic clock unless named unix."""

    refusals: int | None = None
    """The node's count of refused writes when last looked at."""
    filling: Filling | None = None
    """What its shards took when last looked at."""
    cramped_looks: int = 0
    """Looks in a row that found refused writers although there was room."""
    room_look_at_s: float = 0.0
    """Not before that is the target looked at for want of room, unless writers are refused."""
    looked_at_s: float = -1e9
    """When its slots were last looked at, which took `look_took_s`."""
    look_took_s: float = 0.0
    rest_until_s: float = 0.0
    """Not before that is it touched at all, because its folder could not be written."""
    ttl_look_at_s: float = 0.0
    """When it is looked at for the TTL."""
    is_settled: bool = False
    """No batch of victims is, or may have been left, in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLook:
    """One look at a target: how full it is, and what would go."""

    target: Target
    usage: Usage
    columns: TargetColumns
    plan: EvictionPlan
    now_s: int
    rules: EvictionRules
    policy: RetentionPolicy


def room_wanted(usage: Usage, policy: RetentionPolicy) -> Room:
    """What is to be made free, by the watermarks of a policy."""
    marks = policy.watermarks
    return plan_room(usage.limits, high=marks.high, low=marks.low)


def last_uses_of_victims(look: TargetLook) -> NDArray[np.uint32]:
    """For each victim the latest use with which it would be one too; shape [victims].

    For one that expired: the last second that is expired in its class. For the least used: the last
    second of the youngest bucket that the plan reaches.
    """
    columns, plan, bucket_s = look.columns, look.plan, look.rules.bucket_s
    cutoffs = look.rules.cutoffs(columns.class_names, look.now_s) * bucket_s - 1
    until_s = cutoffs[columns.ttl_class[plan.rows]]
    is_least = plan.reasons == int(EvictReason.LEAST_USED)
    if is_least.any():
        newest = int(columns.last_used_s[plan.rows[is_least]].max()) // bucket_s
        until_s[is_least] = (newest + 1) * bucket_s - 1
    return np.clip(until_s, 0, NEVER_S).astype(np.uint32)
