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

from ..errors import InvalidArgument, StoreError
from ..retention import LogEntry, RetentionPolicy
from ..settings import SETTINGS
from .control_client import Answer, ControlPlane, ControlUnreachable
from .control_options import open_control, who_asks
from .exit_codes import ExitCode
from .output import write_json, write_remark, write_result
from .quantities import count_of, format_duration, format_ratio, format_size

CHANGE_DEADLINE_S = 15.0
"""The API needs up to 5 s with silent nodes, and its first request loads it."""

LOOK_AT_LOG = "the change may have been made: look at `cachalot policy log`"

Changer = Callable[[RetentionPolicy], RetentionPolicy]
SignedChanger = Callable[[RetentionPolicy, "Signature"], RetentionPolicy]


class ChangeNotUnderstood(StoreError):
    """The control API answered a change with something else than the policy."""

    exit_code = ExitCode.NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Who changes the policy, why, and when, as its log has it."""

    who: str
    why: str
    at_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOptions:
    """The options that all commands have which change the policy."""

    cluster: Path
    control: str | None
    token_file: Path | None
    wait_s: float
    who: str | None
    why: str
    is_dry_run: bool
    is_json: bool

    def signature(self) -> Signature:
        return Signature(who=who_asks(self.who), why=self.why, at_s=int(time.time()))


def change_policy(
    options: ChangeOptions,
    change: SignedChanger,
    *,
    request: tuple[str, str],
    body: Mapping[str, Any],
    previewed: Mapping[str, Any] | None = None,
) -> None:
    """Make a change through the control API and report it; as a dry run, try it here.

    `request`: method and path of the API that makes the same change, with `body` and the signature.
    `previewed`: the change for which a dry run asks the workers what would go because of it.
    """
    signature = options.signature()
    if options.is_dry_run:
        tried = try_change(
            options.cluster, options.wait_s, lambda policy: change(policy, signature)
        )
        if previewed is None:
            report_change(tried, is_json=options.is_json, is_dry_run=True)
        else:
            from .gc_preview import preview_change

            preview_change(tried, previewed, options)
        return
    _, plane = open_control(options.cluster, options.control, options.token_file)
    signed = {**body, "who": signature.who, "why": signature.why}
    made = send_change(plane, *request, signed)
    report_change(made, is_json=options.is_json, is_dry_run=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """The newest change in a document, and who has it. `nodes` is empty for a dry run."""

    policy: RetentionPolicy
    nodes: tuple[str, ...] = ()
    missing: Mapping[str, str] | None = None
    is_changed: bool = True
    """False: it was so already. Then the newest change in the document is another one."""

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
            f"{error.reason}; {LOOK_AT_LOG}",
            is_sent=True,
        ) from error
    return _parse_change(answer)


def warn_of_undone_drain(options: ChangeOptions) -> None:
    """Say so beforehand if taking the last change back lets a node drain again."""
    _, plane = open_control(options.cluster, options.control, options.token_file)
    answer = plane.ask_any("GET", "/api/policy", deadline_s=CHANGE_DEADLINE_S)
    by = options.signature()
    entry = _parse_policy(answer).undo(who=by.who, why=by.why, at_s=by.at_s).log[-1]
    kind, _, node = entry.what.partition(".")
    if kind == "draining" and entry.after:
        write_remark(
            f"takes version {entry.undoes} back: {node} drains again, and takes no writes until"
            f" `cachalot drain {node} --undo`"
        )


def _parse_policy(answer: Answer, advice: str = "") -> RetentionPolicy:
    import json

    try:
        return RetentionPolicy.parse(json.dumps(answer.get("policy")).encode())
    except InvalidArgument as error:
        raise ChangeNotUnderstood(
            f"the control API's answer is not understood ({error}); is it of another version?"
            f"{advice}"
        ) from error


def _parse_change(answer: Answer) -> PolicyChange:
    policy = _parse_policy(answer, f" {LOOK_AT_LOG}")
    is_changed = answer.get("is_changed") is not False
    if is_changed and not policy.log:
        raise ChangeNotUnderstood(f"the control API's answer shows no change; {LOOK_AT_LOG}")
    nodes, missing = answer.get("nodes"), answer.get("missing")
    return PolicyChange(
        policy=policy,
        nodes=tuple(str(node) for node in nodes) if isinstance(nodes, list) else (),
        missing=missing if isinstance(missing, dict) else {},
        is_changed=is_changed,
    )


def try_change(cluster: Path, wait_s: float, change: Changer) -> PolicyChange:
    """What a change would make of the newest document. Raises InvalidArgument, NodesDown."""
    from .policy_reader import read_cluster_policy

    newest = read_cluster_policy(cluster, wait_s).newest
    made = change(newest)
    return PolicyChange(policy=made, is_changed=made != newest)


def report_change(change: PolicyChange, *, is_json: bool, is_dry_run: bool) -> None:
    """Say what was changed, from which value to which, and who has it."""
    if is_json:
        write_json(render_change(change, is_dry_run=is_dry_run))
        return
    if not change.is_changed:
        write_result(f"unchanged: it is so already; policy version {change.policy.version}")
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
    changed = change.entry.to_values() if change.is_changed else {"version": change.policy.version}
    return {
        "is_dry_run": is_dry_run,
        "is_changed": change.is_changed,
        **changed,
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
