"""What `cachalot down` says of what it did, to people and to programs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .engine_plan import LocalEngine
from .node_process import AGENT, ENGINE
from .node_stop import StoppedNode
from .quantities import count_of, format_size

if TYPE_CHECKING:
    from .wipe import WipePlan

SHOWN_PATHS_MAX = 40
LOSSES = {
    "decode": ("decodes", "answers get their first token and wait"),
    "prefill": ("prefills", "decode workers compute the prompts"),
}
"""By role: what it does, and how it goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedProcesses:
    """What became of each process, as the JSON output has it."""

    nodes: list[dict[str, Any]] = field(default_factory=list)
    workers: list[dict[str, Any]] = field(default_factory=list)
    agents: list[dict[str, Any]] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)


def render_stopped(node: StoppedNode) -> dict[str, Any]:
    """One node of the JSON output."""
    return {"node": node.node, "pid": node.pid, "outcome": node.outcome.value}


def render_line(one: dict[str, Any]) -> str:
    """What became of one node or agent, for a person."""
    pid = "" if one["pid"] is None else f" (process {one['pid']})"
    return f"{one['node']}: {one['outcome']}{pid}"


def render_json(
    stopped: StoppedProcesses, plan: WipePlan | None, *, dry_run: bool
) -> dict[str, Any]:
    """The JSON object of `cachalot down --json`. With `is_dry_run` nothing of it was done."""
    return {
        "is_dry_run": dry_run,
        "nodes": stopped.nodes,
        "workers": stopped.workers,
        "agents": [_rename(one, AGENT.noun) for one in stopped.agents],
        "engines": [_rename(one, ENGINE.noun) for one in stopped.engines],
        "removed_paths": [] if plan is None else [str(path) for path in plan.files],
        "removed_bytes": 0 if plan is None else plan.freed_bytes,
        "kept_paths": [] if plan is None else [str(path) for path in plan.kept],
    }


def _rename(one: dict[str, Any], noun: str) -> dict[str, Any]:
    return {noun: one["node"], "pid": one["pid"], "outcome": one["outcome"]}


def render_lines(stopped: StoppedProcesses) -> list[str]:
    """What became of each process, for a person."""
    lines = [*map(render_line, [*stopped.nodes, *stopped.agents, *stopped.engines])]
    ended = [worker for worker in stopped.workers if worker["outcome"] != "not running"]
    if ended:
        outcomes = sorted({worker["outcome"] for worker in ended})
        lines.append(f"{count_of(len(ended), 'gc_worker')}: {' or '.join(outcomes)}")
    return lines


def describe_loss(running: Sequence[LocalEngine], names: Collection[str]) -> str:
    """What becomes of answers when of the engines that run those called `names` stop; empty if
    others do the same. Pure."""
    gone = [one for one in running if one.name in names]
    left = {one.role for one in running if one.name not in names}
    if gone and not left:
        who = ", ".join(one.name for one in gone)
        return f"without {who} no engine runs: nobody is answered until one is back"
    for role, (verb, loss) in LOSSES.items():
        last = [one.name for one in gone if one.role in (role, "both")]
        if last and not left & {role, "both"}:
            return f"without {', '.join(last)} no engine {verb}: {loss} until one is back"
    return ""


def render_plan(plan: WipePlan, *, dry_run: bool) -> list[str]:
    """What was removed, for a person."""
    lines = []
    if dry_run:
        lines += [f"would be removed: {path}" for path in plan.files[:SHOWN_PATHS_MAX]]
        hidden = len(plan.files) - SHOWN_PATHS_MAX
        more = f"... and {count_of(hidden, 'more file')} (--json lists all)"
        lines += [more] if hidden > 0 else []
    lines += [f"not ours, stays: {path}" for path in plan.kept[:SHOWN_PATHS_MAX]]
    verb = "would be removed" if dry_run else "removed"
    files = count_of(len(plan.files), "file")
    return [*lines, f"{files} {verb}, {format_size(plan.freed_bytes)}"]
