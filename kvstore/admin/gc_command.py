"""`cachalot gc run`: evicts now what the policy demands, and says before what will go."""

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .control_options import (
    ClusterOption,
    ControlOption,
    DryRunOption,
    JsonOption,
    TokenFileOption,
    make_group,
    open_control,
)
from .exit_codes import ExitCode
from .output import progress_bar, write_json, write_remark, write_result
from .quantities import count_of

if TYPE_CHECKING:
    from ..cluster.entities import ClusterMap
    from ..errors import StoreError
    from .control_client import Answer, ControlEndpoint, ControlPlane
    from .gc_preview import EvictionPreview

ROUND_S = 60.0
"""A request to go on evicting lasts so long at most."""
SLACK_S = 20.0

app = make_group("Eviction: what would go, and doing it now.")


@app.callback()
def gc() -> None:
    """Keeps `run` a command of its own: a group of one command would be that command."""


@app.command("run")
def run(
    cluster: ClusterOption,
    nodes: Annotated[
        list[str] | None,
        typer.Option("--node", help="Only on this node; may be given again.", metavar="NODE"),
    ] = None,
    is_dry_run: DryRunOption = False,
    is_sure: Annotated[bool, typer.Option("--yes", help="Do not ask on a terminal.")] = False,
    wait_s: Annotated[
        float,
        typer.Option("--wait-s", help="How long to wait.", metavar="S", min=1.0, max=86_400.0),
    ] = 300.0,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    is_json: JsonOption = False,
) -> None:
    """Evict now what the policy demands.

    That is expired blocks, and the least used ones of a target above its high watermark: what goes
    by itself in a while. Says first what will go, by class and age; on a terminal it asks. Ends
    with exit code 8 if it was not done in time, and with 4 if a node's worker could not be asked.
    """
    from .gc_preview import ask_newest_plans, write_preview

    cluster_map, plane = open_control(cluster, control, token_file)
    _restrict(cluster_map, plane, nodes, control)
    preview = ask_newest_plans(plane)
    if not preview.plans:
        from .control_client import no_worker

        raise no_worker(list(preview.problems.values()))
    if not is_json:
        write_preview(preview)
        write_result(preview.describe() + (" (dry run)" if is_dry_run else ""))
    answers: dict[str, Answer | StoreError] = {}
    if not is_dry_run and preview.shards:
        _make_sure(is_sure=is_sure or is_json)
        answers = _run_all(plane, preview, wait_s)
    _report(preview, answers, is_json=is_json, is_dry_run=is_dry_run)


def _restrict(
    cluster_map: "ClusterMap", plane: "ControlPlane", nodes: list[str] | None, control: str | None
) -> None:
    from ..errors import InvalidArgument, shown

    for node in nodes or ():
        if node not in cluster_map.node_by_name:
            known = ", ".join(one.name for one in cluster_map.nodes)
            raise InvalidArgument("--node", given=shown(node), expected=f"one of the map: {known}")
    if nodes and control is not None:
        raise InvalidArgument(
            "--node",
            given="--control too",
            expected="one of them: a worker evicts from its own node only",
        )
    if nodes:
        plane.endpoints = [plane.endpoint_of(node) for node in dict.fromkeys(nodes)]


def _make_sure(*, is_sure: bool) -> None:
    """Asks a person. A script gets what it says: the policy would have it so in a while anyway."""
    if not is_sure and sys.stdin.isatty() and sys.stdout.isatty():
        typer.confirm("Evict them now?", abort=True)


def _run_all(
    plane: "ControlPlane", preview: "EvictionPreview", wait_s: float
) -> "dict[str, Answer | StoreError]":
    """Every planned node's last answer or error."""
    chosen = [one for one in plane.endpoints if one.node in preview.plans]
    due_s = time.monotonic() + wait_s
    answers: dict[str, Answer | StoreError] = {}

    def run_one(endpoint: "ControlEndpoint") -> None:
        answers[endpoint.node] = _run_one(plane, endpoint, due_s)
        bar.show(len(answers))

    with progress_bar("evicting, nodes", len(chosen)) as bar:
        plane.run_side_by_side([partial(run_one, endpoint) for endpoint in chosen])
    return {endpoint.node: answers[endpoint.node] for endpoint in chosen}


def _run_one(
    plane: "ControlPlane", endpoint: "ControlEndpoint", due_s: float
) -> "Answer | StoreError":
    """Has one worker evict until it is done or the time is up; it goes on by itself then."""
    from ..errors import StoreError

    try:
        while True:
            round_s = min(ROUND_S, max(due_s - time.monotonic(), 0.1))
            answer = plane.ask(
                endpoint,
                "POST",
                "/api/gc/run",
                body={"deadline_s": round_s},
                deadline_s=round_s + SLACK_S,
            )
            if answer.get("is_done") or time.monotonic() >= due_s:
                return answer
    except StoreError as error:
        return error


def _report(
    preview: "EvictionPreview",
    answers: "dict[str, Answer | StoreError]",
    *,
    is_json: bool,
    is_dry_run: bool,
) -> None:
    runs = {node: answer for node, answer in answers.items() if isinstance(answer, dict)}
    failed = {node: str(one) for node, one in answers.items() if not isinstance(one, dict)}
    unfinished = [node for node, answer in runs.items() if not answer.get("is_done")]
    evicted = count_evicted(runs)
    if is_json:
        values: dict[str, Any] = {"is_dry_run": is_dry_run, "would_go": preview.render_json()}
        values |= {"evicted": evicted, "runs": runs, "failed": failed, "unfinished": unfinished}
        write_json(values)
    elif answers:
        reasons = ", ".join(
            f"{shards:,} {reason.replace('_', ' ')}" for reason, shards in evicted.items() if shards
        )
        gone = count_of(sum(evicted.values()), "shard")
        write_result(f"{gone} evicted{f' ({reasons})' if reasons else ''}")
        if unfinished:
            write_result(f"not done yet on {', '.join(unfinished)}; it goes on by itself")
    for problem in failed.values():
        write_remark(problem)
    if failed or preview.problems:
        raise typer.Exit(ExitCode.NODE)
    if unfinished:
        raise typer.Exit(ExitCode.NOT_DONE)


def count_evicted(runs: "dict[str, Answer]") -> dict[str, int]:
    """Shards that went, by reason, over all nodes."""
    total: dict[str, int] = {}
    for answer in runs.values():
        evicted = answer.get("evicted")
        for reason, shards in (evicted if isinstance(evicted, dict) else {}).items():
            total[reason] = total.get(reason, 0) + (shards if type(shards) is int else 0)
    return total
