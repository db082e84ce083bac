"""What eviction would remove, as the workers plan it: added up, and shown by class and age.

Each worker plans for the targets of its own node; a block that goes from one node is withdrawn from
all, so that shards of it stand in the plans of several. The sums are pure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument, StoreError
from .output import write_json, write_remark, write_result, write_table
from .quantities import count_of, format_duration, format_ratio, format_size

if TYPE_CHECKING:
    from .control_client import Answer, ControlPlane
    from .policy_change import PolicyChange

PLAN_DEADLINE_S = 120.0
"""A node of 10^7 slots is looked at for seconds; a busy one is given time."""
POLICY_DEADLINE_S = 10.0
"""Workers compare their policy with others every 2 s."""
POLL_S = 0.5
COLUMNS = ("class", "reason", "last used", "shards", "bytes")
LEFT_COLUMNS = frozenset({"class", "reason", "last used"})
FIGURE_MAX = 2**63 - 1

GroupKey = tuple[str, str, int, int | None]
"""Class, reason, and the ages from above the first to the second, None: no upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPreview:
    """The plans of all workers that answered, added up."""

    groups: Mapping[GroupKey, tuple[int, int]]
    """Shards and bytes of each."""
    plans: Mapping[str, Mapping[str, Any]]
    """What each node's worker answered."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why others did not."""
    is_cut: bool = False
    """More would go: one plan is bounded, and the next one goes on."""

    @property
    def shards(self) -> int:
        return sum(shards for shards, _ in self.groups.values())

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.groups.values())

    def describe(self) -> str:
        """One line: how much would go."""
        if not self.shards:
            return f"nothing would go from {count_of(len(self.plans), 'node')}"
        more = ", and more after that" if self.is_cut else ""
        nodes = sum(any(t.get("shards") for t in p["targets"]) for p in self.plans.values())
        return (
            f"{count_of(self.shards, 'shard')} ({format_size(self.bytes)}) would go from"
            f" {count_of(nodes, 'node')}{more}"
        )

    def rows(self) -> list[list[str]]:
        """The cells of each group, in the order of COLUMNS: by class, then the oldest first."""
        ordered = sorted(self.groups.items(), key=lambda item: (*item[0][:2], -item[0][2]))
        return [
            [
                name,
                reason.replace("_", " "),
                format_ages(least_s, most_s),
                f"{shards:,}",
                format_size(size),
            ]
            for (name, reason, least_s, most_s), (shards, size) in ordered
        ]

    def render_json(self) -> dict[str, Any]:
        return {
            "shards": self.shards,
            "bytes": self.bytes,
            "is_cut": self.is_cut,
            "groups": [
                {
                    "class": name,
                    "reason": reason,
                    "age_min_s": least_s,
                    "age_max_s": most_s,
                    "shards": shards,
                    "bytes": size,
                }
                for (name, reason, least_s, most_s), (shards, size) in self.groups.items()
            ],
            "plans": dict(self.plans),
            "problems": dict(self.problems),
        }


def add_up_plans(answers: Mapping[str, Answer | StoreError]) -> EvictionPreview:
    """The sum of the plans among the answers; what is not understood counts as a problem."""
    groups: dict[GroupKey, tuple[int, int]] = {}
    plans: dict[str, Mapping[str, Any]] = {}
    problems: dict[str, str] = {}
    is_cut = False
    for node, answer in answers.items():
        found = None if isinstance(answer, StoreError) else _parse_groups(answer)
        if isinstance(answer, StoreError) or found is None:
            is_error = isinstance(answer, StoreError)
            problems[node] = str(answer) if is_error else f"node {node}: its plan is not understood"
            continue
        plans[node] = answer
        is_cut |= any(bool(target.get("is_cut")) for target in answer["targets"])
        for key, shards, size in found:
            before = groups.get(key, (0, 0))
            groups[key] = (before[0] + shards, before[1] + size)
    return EvictionPreview(groups=groups, plans=plans, problems=problems, is_cut=is_cut)


def _parse_groups(plan: Mapping[str, Any]) -> list[tuple[GroupKey, int, int]] | None:
    """The groups of all targets of one plan; None if they are not what a worker says."""
    found: list[tuple[GroupKey, int, int]] = []
    try:
        for target in plan["targets"]:
            for group in target["groups"]:
                most_s = group["age_max_s"]
                key = (
                    str(group["class"]),
                    str(group["reason"]),
                    _figure(group["age_min_s"]),
                    None if most_s is None else _figure(most_s),
                )
                found.append((key, _figure(group["shards"]), _figure(group["bytes"])))
    except (KeyError, TypeError, ValueError):
        return None
    return found


def _figure(value: object) -> int:
    if type(value) is not int or not 0 <= value <= FIGURE_MAX:
        raise ValueError(value)
    return value


def format_ages(least_s: int, most_s: int | None) -> str:
    """A group of ages in words."""
    if most_s is None:
        return f"more than {format_duration(least_s)} ago"
    if not least_s:
        return f"up to {format_duration(most_s)} ago"
    return f"{format_duration(least_s)} to {format_duration(most_s)} ago"


def write_preview(preview: EvictionPreview) -> None:
    """The table and how full the targets are, for a person; problems on stderr."""
    if preview.groups:
        write_table(COLUMNS, preview.rows(), left_columns=LEFT_COLUMNS)
        write_result("")
    for plan in preview.plans.values():
        for target in plan["targets"]:
            if target.get("shards"):
                write_result(describe_target(target))
    for problem in preview.problems.values():
        write_remark(problem)


def describe_target(target: Mapping[str, Any]) -> str:
    """How full a target is, against its watermarks."""
    return (
        f"{target.get('target')}: {format_ratio(float(target.get('fill', 0)))} full"
        f" (by {str(target.get('decided_by', '?')).replace('_', ' ')};"
        f" high {format_ratio(float(target.get('high', 0)))},"
        f" low {format_ratio(float(target.get('low', 0)))}):"
        f" {int(target.get('shards', 0)):,} of"
        f" {count_of(int(target.get('shards_held', 0)), 'shard')} would go"
    )


def ask_plans(plane: ControlPlane, change: Mapping[str, Any] | None = None) -> EvictionPreview:
    """What would go now, or after a change of the policy. Never raises for a silent worker."""
    if change is None:
        answers = plane.ask_each("GET", "/api/gc/plan", deadline_s=PLAN_DEADLINE_S)
    else:
        body = {"change": dict(change)}
        answers = plane.ask_each("POST", "/api/gc/plan", body=body, deadline_s=PLAN_DEADLINE_S)
    return add_up_plans(answers)


def ask_newest_plans(plane: ControlPlane) -> EvictionPreview:
    """What would go now under the newest policy of the cluster.

    A worker learns within seconds of a policy that another one changed; one that still plans by an
    older one is given that time, and named if it was not enough. Raises NoWorker.
    """
    policy = plane.ask_any("GET", "/api/policy", deadline_s=POLICY_DEADLINE_S).get("policy")
    version = policy.get("version") if isinstance(policy, dict) else None
    due_s = time.monotonic() + POLICY_DEADLINE_S
    while True:
        preview = ask_plans(plane)
        behind = find_behind(preview, version if type(version) is int else 0)
        if not behind or time.monotonic() >= due_s:
            break
        time.sleep(POLL_S)
    for node in behind:
        write_remark(f"node {node}: its worker still plans by an older policy")
    return preview


def find_behind(preview: EvictionPreview, version: int) -> list[str]:
    """Nodes whose worker planned by an older policy than `version`."""
    versions = {node: plan.get("policy_version") for node, plan in preview.plans.items()}
    return [node for node, found in versions.items() if type(found) is int and found < version]


def preview_change(
    tried: PolicyChange,
    change: Mapping[str, Any],
    cluster: Path,
    control: str | None,
    token_file: Path | None,
    *,
    is_json: bool,
) -> None:
    """The dry run of a change of the policy: what it changes, and what would go because of it.

    Without a worker to ask, the change alone is shown, and that it is so.
    """
    from .control_client import NoWorker
    from .control_options import open_control
    from .policy_change import render_change, report_change

    preview, problem = None, ""
    try:
        _, plane = open_control(cluster, control, token_file)
        preview = ask_plans(plane, change)
    except (NoWorker, InvalidArgument) as error:
        problem = str(error)
    if is_json:
        would_go = None if preview is None else preview.render_json()
        write_json(render_change(tried, is_dry_run=True) | {"would_go": would_go})
        return
    report_change(tried, is_json=False, is_dry_run=True)
    if preview is not None and preview.plans:
        write_preview(preview)
        write_result(f"after this change {preview.describe()}")
    else:
        problems = "; ".join(preview.problems.values()) if preview is not None else problem
        write_remark(f"what would go because of it is not known: {problems}")
