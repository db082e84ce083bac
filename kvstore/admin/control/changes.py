"""What a request may change of the policy, and the rule that only the API knows. Pure.

A change is a value that is applied to whatever policy is the newest one when its turn comes. The
policy's own rules stand in `kvstore.retention`; that a node is in the map, and that blocks can
still be written while it drains, only the map can say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...cluster.entities import ClusterMap
from ...errors import InvalidArgument, shown
from ...retention import RetentionPolicy

Changer = Callable[[RetentionPolicy], RetentionPolicy]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TtlChange(_Strict):
    """Another TTL for a class; `is_new` for a class that the policy does not list."""

    kind: Literal["ttl"]
    ttl_class: str
    ttl_s: int
    is_new: bool = False


class WatermarksChange(_Strict):
    """Other watermarks, as shares of a target."""

    kind: Literal["watermarks"]
    high: float
    low: float


class SettingChange(_Strict):
    """Another value of a hot setting; null is its default."""

    kind: Literal["setting"]
    name: str
    value: bool | int | None


Change = Annotated[TtlChange | WatermarksChange | SettingChange, Field(discriminator="kind")]


class Signature(_Strict):
    """Who wants a change, and why: both stand in the policy's log."""

    who: str
    why: str = ""


class SignedChange(Signature):
    """The body of PUT /api/policy."""

    change: Change


class SettingBody(Signature):
    """The body of PUT /api/settings."""

    name: str
    value: bool | int | None


class ChangeBody(_Strict):
    """The body of POST /api/gc/plan: what would go under a changed policy."""

    change: Change


class GcRunBody(_Strict):
    """The body of POST /api/gc/run."""

    deadline_s: float = Field(default=60.0, gt=0, le=300)


class VerifyBody(_Strict):
    """The body of POST /api/verify."""

    sample: int = Field(default=100, ge=1, le=100_000)
    deadline_s: float = Field(default=60.0, gt=0, le=300)


def apply_change(
    policy: RetentionPolicy, change: Change, *, who: str, why: str, at_s: int
) -> RetentionPolicy:
    """The next version of a policy. Raises InvalidArgument with the rule that the change breaks."""
    if isinstance(change, TtlChange):
        return policy.with_ttl(
            change.ttl_class, change.ttl_s, is_new=change.is_new, who=who, why=why, at_s=at_s
        )
    if isinstance(change, WatermarksChange):
        return policy.with_watermarks(high=change.high, low=change.low, who=who, why=why, at_s=at_s)
    return policy.with_setting(change.name, change.value, who=who, why=why, at_s=at_s)


def check_node_is_known(cluster_map: ClusterMap, node: str) -> None:
    """Raises InvalidArgument unless the node is in the map."""
    if node not in cluster_map.node_by_name:
        known = ", ".join(one.name for one in cluster_map.nodes[:16])
        more = ", ..." if len(cluster_map.nodes) > 16 else ""
        raise InvalidArgument("node", given=shown(node), expected=f"one of the map: {known}{more}")


def check_drain(cluster_map: ClusterMap, draining: frozenset[str], node: str) -> None:
    """Raises InvalidArgument if blocks could not be written any more while `node` drains too.

    A draining node stores nothing new, so of each group at most k + m - write_acks may drain.
    """
    check_node_is_known(cluster_map, node)
    spare = cluster_map.width - cluster_map.code.write_acks
    for group in cluster_map.groups:
        members = {cluster_map.node_of(target).name for target in group.targets}
        found = sorted(members & (draining | {node}))
        if node in members and len(found) > spare:
            others = ", ".join(name for name in found if name != node)
            raise InvalidArgument(
                "drain",
                given=f"{node!r} beside {others}" if others else repr(node),
                expected=f"at most {spare} draining in a code group (group {group.name}): a block"
                f" needs {cluster_map.code.write_acks} of {cluster_map.width} nodes to be stored",
            )
