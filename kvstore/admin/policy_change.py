"""Changes of the retention policy as commands make and show them.

What may be changed is decided by `kvstore.retention`; the control API puts it in force on all
nodes. A dry run makes the same change of the newest document that any node has, and throws it away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..retention import LogEntry, RetentionPolicy
from ..settings import SETTINGS
from .control_client import Answer, ControlPlane, ControlUnreachable
from .output import write_json, write_remark, write_result
from .quantities import count_of, format_duration, format_ratio, format_size

CHANGE_DEADLINE_S = 15.0
"""The API needs up to 5 s with silent nodes, and its first request loads it."""

Changer = Callable[[RetentionPolicy], RetentionPolicy]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """The newest change in a document, and who has it. `nodes` is empty for a dry run."""

    policy: RetentionPolicy
    nodes: tuple[str, ...] = ()
    missing: Mapping[str, str] | None = None

    @property
    def entry(self) -> LogEntry:
        return self.policy.log[-1]


def send_change(plane: ControlPlane, method: str, path: str, body: object) -> PolicyChange:
    """Have the control API make a change. Raises NoWorker, ControlRefused, ControlUnreachable."""
    try:
        answer = plane.ask_any(method, path, body=body, deadline_s=CHANGE_DEADLINE_S)
    except ControlUnreachable as error:
        raise ControlUnreachable(
            error.node,
            error.address,
            f"{error.reason}; the change may have been made: look at `cachalot policy log`",
            is_sent=True,
        ) from error
    return _parse_change(answer)


def _parse_change(answer: Answer) -> PolicyChange:
    import json

    policy = RetentionPolicy.parse(json.dumps(answer.get("policy")).encode())
    nodes, missing = answer.get("nodes"), answer.get("missing")
    return PolicyChange(
        policy=policy,
        nodes=tuple(str(node) for node in nodes) if isinstance(nodes, list) else (),
        missing=missing if isinstance(missing, dict) else {},
    )


def try_change(cluster: Path, wait_s: float, change: Changer) -> PolicyChange:
    """What a change would make of the newest document. Raises InvalidArgument, NodesDown."""
    from .policy_reader import read_cluster_policy

    return PolicyChange(policy=change(read_cluster_policy(cluster, wait_s).newest))


def at_s() -> int:
    """Now, as the log of the policy counts time."""
    return int(time.time())


def report_change(change: PolicyChange, *, is_json: bool, is_dry_run: bool) -> None:
    """Say what was changed, from which value to which, and who has it."""
    if is_json:
        write_json(render_change(change, is_dry_run=is_dry_run))
        return
    line = describe_entry(change.entry)
    if is_dry_run:
        write_result(f"{line} (dry run: nothing was changed)")
        return
    write_result(
        f"{line}; policy version {change.policy.version} on {count_of(len(change.nodes), 'node')}"
    )
    for node, problem in (change.missing or {}).items():
        write_remark(f"node {node} does not have it yet: {problem}; it catches up by itself")


def render_change(change: PolicyChange, *, is_dry_run: bool) -> dict[str, Any]:
    """The JSON object of a command that changes the policy."""
    return {
        "is_dry_run": is_dry_run,
        **change.entry.to_values(),
        "nodes": list(change.nodes),
        "missing": dict(change.missing or {}),
    }


def describe_entry(entry: LogEntry) -> str:
    """A change in words, such as "TTL of chat: 7 d -> 5 d"."""
    kind, _, name = entry.what.partition(".")
    names = {
        "ttl_s": f"TTL of {name}",
        "watermarks": "watermarks",
        "settings": name,
        "draining": f"draining of {name}",
    }
    before, after = format_value(entry.what, entry.before), format_value(entry.what, entry.after)
    return f"{names.get(kind, entry.what)}: {before} -> {after}"


def format_value(what: str, value: object) -> str:
    """A value of the log for a person."""
    kind, _, name = what.partition(".")
    if value is None:
        return "(default)" if kind == "settings" else "(not listed)"
    if isinstance(value, Mapping):
        return f"high {format_ratio(value['high'])}, low {format_ratio(value['low'])}"
    if isinstance(value, bool):
        return "on" if value else "off"
    if kind == "ttl_s" and isinstance(value, int):
        return format_duration(value)
    return format_setting(name, value)


def format_setting(name: str, value: object) -> str:
    """A setting's value with its unit, as a person reads it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    unit = SETTINGS[name].unit if name in SETTINGS else ""
    if isinstance(value, int):
        if unit == "bytes a second":
            return f"{format_size(value)}/s"
        if unit == "seconds":
            return format_duration(value)
        return f"{value:,}/s" if unit.endswith(" a second") else f"{value:,}"
    return str(value)
