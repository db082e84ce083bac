"""`cachalot drain`: empties a node of its duties, and says when it may be stopped for good."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .control_options import (
    ClusterOption,
    ControlOption,
    DryRunOption,
    JsonOption,
    TokenFileOption,
    WhoOption,
    WhyOption,
    open_control,
    who_asks,
)
from .exit_codes import ExitCode
from .output import Progress, progress_bar, write_json, write_remark, write_result
from .quantities import count_of, format_duration

if TYPE_CHECKING:
    from ..cluster.entities import ClusterMap
    from .control_client import Answer, ControlEndpoint, ControlPlane
    from .policy_change import PolicyChange

POLL_S = 1.0
FIRST_DEADLINE_S = 15.0
"""A worker loads its API when it is asked for the first time."""
ASK_DEADLINE_S = 5.0
READ_DEADLINE_S = 2.0


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name in the map.")],
    cluster: ClusterOption,
    is_undo: Annotated[
        bool, typer.Option("--undo", help="Let the node take writes again.")
    ] = False,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait-s",
            help="How long to wait until it may be stopped; 0 only begins.",
            metavar="S",
            min=0.0,
            max=604_800.0,
        ),
    ] = 600.0,
    why: WhyOption = "",
    who: WhoOption = None,
    is_dry_run: DryRunOption = False,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    is_json: JsonOption = False,
) -> None:
    """Ready a node to be stopped for good.

    It takes no more writes, its worker completes its blocks on the other nodes, and this says when
    it may go. It goes on serving what it has. Nothing is deleted. May be run again, to look how
    far it is; ends with exit code 8 if it may not be stopped yet.
    """
    from .policy_change import report_change

    _check_node(cluster, node)
    signature = {"who": who_asks(who), "why": why}
    if is_dry_run:
        change = _try(cluster, node, **signature, is_undo=is_undo)
        report_change(change, is_json=is_json, is_dry_run=True)
        return
    cluster_map, plane = open_control(cluster, control, token_file)
    if is_undo:
        report_change(_send(plane, "DELETE", node, signature), is_json=is_json, is_dry_run=False)
        return
    endpoint = _find_worker(plane, node, control) if wait_s else None
    # Asked again, it is not changed again: then this is a look at how far it is.
    if node not in _draining(plane):
        if endpoint is not None:
            _check_can_drain(plane, endpoint, node)
        made = _send(plane, "POST", node, signature)
        if not is_json:
            report_change(made, is_json=False, is_dry_run=False)
    report = _wait(plane, endpoint, node, wait_s) if endpoint is not None else None
    _finish(cluster_map, node, report, wait_s=wait_s, is_json=is_json)


def _check_node(cluster: Path, node: str) -> None:
    """Raises InvalidArgument for what is no node of the map."""
    from ..cluster.map import load_cluster_map
    from .control.changes import check_node_is_known
    from .engine_plan import check_is_no_engine
    from .local_folder import LocalFolder

    cluster_map = load_cluster_map(cluster)
    folder = LocalFolder(cluster.absolute().parent)
    check_is_no_engine(folder, node, cluster_map.node_by_name)
    check_node_is_known(cluster_map, node)


def _find_worker(plane: "ControlPlane", node: str, control: str | None) -> "ControlEndpoint":
    """Whom to ask how far the node is: its own worker. Found before anything is changed."""
    from ..errors import InvalidArgument

    if control is None:
        return plane.endpoint_of(node)
    endpoint = plane.endpoints[0]
    found = plane.ask_any("GET", "/api/drain", deadline_s=FIRST_DEADLINE_S).get("node")
    if found != node:
        raise InvalidArgument(
            "--control",
            given=f"{endpoint.address}, which is of {found}",
            expected=f"the control API of {node}, which alone knows how far it is; --wait-s 0 only"
            " begins",
        )
    return endpoint


def _check_can_drain(plane: "ControlPlane", endpoint: "ControlEndpoint", node: str) -> None:
    """Raises NodeError if its worker does not answer: nobody would complete its blocks."""
    from ..errors import NodeError
    from .control_client import ControlUnreachable

    try:
        plane.ask(endpoint, "GET", "/api/drain", deadline_s=FIRST_DEADLINE_S)
    except ControlUnreachable as error:
        raise NodeError(
            node,
            f"its gc_worker, which would do it, does not answer at {error.address}"
            f" ({error.reason}); nothing was changed: start it, or replace a node that is lost"
            " without draining it",
        ) from error


def _try(cluster: Path, node: str, who: str, why: str, *, is_undo: bool) -> "PolicyChange":
    from ..cluster.map import load_cluster_map
    from ..retention import RetentionPolicy
    from .control.changes import check_drain
    from .policy_change import try_change

    cluster_map = load_cluster_map(cluster)

    def apply(policy: RetentionPolicy) -> RetentionPolicy:
        if not is_undo:
            check_drain(cluster_map, policy.draining, node)
        return policy.with_draining(node, not is_undo, who=who, why=why, at_s=int(time.time()))

    return try_change(cluster, READ_DEADLINE_S, apply)


def _send(plane: "ControlPlane", method: str, node: str, body: object) -> "PolicyChange":
    from .control_client import quote_part
    from .policy_change import send_change

    return send_change(plane, method, f"/api/drain/{quote_part(node)}", body)


def _draining(plane: "ControlPlane") -> list[str]:
    found = plane.ask_any("GET", "/api/drain", deadline_s=FIRST_DEADLINE_S).get("draining")
    return [str(name) for name in found] if isinstance(found, list) else []


def _wait(
    plane: "ControlPlane", endpoint: "ControlEndpoint", node: str, wait_s: float
) -> "Answer | None":
    """The node's own report when it may be stopped, or the last one when the time is up."""
    from .control_client import ControlUnreachable

    due_s = time.monotonic() + wait_s
    report: Answer | None = None
    remark = ""
    with progress_bar(f"draining {node}", 1000) as bar:
        while True:
            try:
                said = plane.ask(endpoint, "GET", "/api/drain", deadline_s=ASK_DEADLINE_S)
                found = said.get("report")
                report = found if isinstance(found, dict) else report
            except ControlUnreachable as error:
                # A worker that is started anew goes on where the policy says.
                if time.monotonic() >= due_s:
                    raise
                if str(error) != remark:
                    remark = str(error)
                    write_remark(remark)
            _show(bar, report)
            if (report or {}).get("is_safe_to_stop") or time.monotonic() >= due_s:
                return report
            time.sleep(min(POLL_S, max(due_s - time.monotonic(), 0.0)))


def _show(bar: Progress, report: "Answer | None") -> None:
    if report is None:
        return
    total = max(int(report.get("blocks_total", 0)), 1)
    checked = min(int(report.get("checked", 0)), total)
    bar.show(checked * 1000 // total, f"{checked:,} of {count_of(total, 'block')}")


def _finish(
    cluster_map: "ClusterMap", node: str, report: "Answer | None", *, wait_s: float, is_json: bool
) -> None:
    is_safe = bool((report or {}).get("is_safe_to_stop"))
    if is_json:
        # Without a wait nobody looked, which is no answer to whether it may be stopped.
        shown_safe = is_safe if wait_s else None
        write_json({"node": node, "is_safe_to_stop": shown_safe, "report": report})
    elif is_safe:
        write_result(describe_report(node, report or {}))
        spare = cluster_map.code.m
        write_result(
            f"{node} may be stopped; take it off the cluster map then"
            f" (code {cluster_map.code.k}+{spare}: until then it counts as one that is down)"
        )
    elif wait_s:
        write_result(describe_report(node, report or {}))
        write_result(
            f"{node} may not be stopped yet after {format_duration(wait_s)}; it goes on by itself:"
            " run this again to look"
        )
    else:
        write_result(f"{node} drains; run this again to see when it may be stopped")
    if wait_s and not is_safe:
        raise typer.Exit(ExitCode.NOT_DONE)


def describe_report(node: str, report: "Answer") -> str:
    """How far the node is, in a line."""
    if not report:
        return f"{node}: its worker has not looked at its blocks yet"
    line = (
        f"{node}: {count_of(int(report.get('checked', 0)), 'block')} checked,"
        f" {int(report.get('safe', 0)):,} can be read without it,"
        f" {int(report.get('at_risk', 0)):,} cannot yet,"
        f" {count_of(int(report.get('repaired_shards', 0)), 'shard')} written elsewhere"
    )
    silent = report.get("silent_targets")
    if isinstance(silent, list) and silent:
        line += f"; no answer from {', '.join(map(str, silent))}"
    return line
