"""`cachalot down`: ends what `cachalot up` started, and nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidArgument
from .down_report import (
    StoppedProcesses,
    render_json,
    render_line,
    render_lines,
    render_plan,
    render_stopped,
)
from .engine_plan import AFTER_GRACE_S, check_is_engine
from .folder_option import parse_folder
from .local_agents import stop_agents
from .local_engines import stop_engines
from .local_folder import LocalFolder
from .node_process import AGENT, ENGINE, GC_WORKER, StopDeadlines
from .node_stop import find_process, stop_nodes
from .output import write_json, write_remark, write_result

if TYPE_CHECKING:
    from .wipe import WipePlan

FolderOption = Annotated[
    Path,
    typer.Option("--dir", help="Folder that was given to `up`.", metavar="D", parser=parse_folder),
]
WipeOption = Annotated[
    bool, typer.Option("--wipe", help="Remove what the nodes stored, and the map.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only show what would be stopped and removed.")
]
NodeOption = Annotated[
    str | None, typer.Option(help="Stop this node only; `up` starts it again.", metavar="NAME")
]
AgentOption = Annotated[
    str | None, typer.Option(help="Stop this agent only; `up` starts it again.", metavar="NAME")
]
EngineOption = Annotated[
    str | None,
    typer.Option(help="Drain and stop this engine only; `up` starts it again.", metavar="NAME"),
]
RemoveOption = Annotated[
    bool,
    typer.Option(
        "--remove", help="With --engine: the cluster has it no more. Its log is removed too."
    ),
]
WaitOption = Annotated[
    float,
    typer.Option(
        help="How long after SIGTERM to send SIGKILL; an engine has its grace and"
        f" {AFTER_GRACE_S:.0f} s, if that is longer.",
        metavar="S",
        min=0.1,
        max=3600.0,
    ),
]


def down(
    folder: FolderOption,
    wipe: WipeOption = False,
    dry_run: DryRunOption = False,
    node: NodeOption = None,
    agent: AgentOption = None,
    engine: EngineOption = None,
    is_removal: RemoveOption = False,
    wait_s: WaitOption = 20.0,
    is_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Stop the nodes, agents and engines of a local cluster, or one of them.

    What they stored stays for the next `up`, except with --wipe. May be run again.
    `down --engine d02 --remove` takes an engine out of the cluster: `up --engines` adds one.
    """
    place = LocalFolder(folder)
    places = place, place.of(GC_WORKER), place.of(AGENT), place.of(ENGINE)
    nodes_place, workers_place, agents_place, engines_place = places
    is_recorded = any(one.recorded_nodes() for one in places)
    _check_choice({"--node": node, "--agent": agent, "--engine": engine, "--wipe": wipe or None})
    _check_names(place, node=node, agent=agent, engine=engine)
    if is_removal:
        _remove_engine(place, engine, wait_s, dry_run=dry_run, is_json=is_json)
        return
    if not place.cluster_path.exists() and not is_recorded:
        _answer_without_cluster(place, dry_run=dry_run, is_json=is_json)
        return
    only = node or agent or engine
    with place.locked():
        deadlines = StopDeadlines(term_s=wait_s)

        def stop(place: LocalFolder, name: str | None) -> list[dict[str, Any]]:
            return _stop(place, deadlines, name, dry_run=dry_run) if name == only else []

        # Who uses the nodes goes first, so that none complains about nodes that are meant to go.
        stopped = StoppedProcesses(
            engines=stop(engines_place, engine),
            agents=stop(agents_place, agent),
            workers=stop(workers_place, node),
            nodes=stop(nodes_place, node),
        )
        plan = _wipe(place, dry_run=dry_run) if wipe else None
    if is_json:
        write_json(render_json(stopped, plan, dry_run=dry_run))
    else:
        lines = render_lines(stopped, plan, dry_run=dry_run)
        if agent is not None or engine is not None:
            ended = [*stopped.agents, *stopped.engines]
            lines = [*map(render_line, ended)] or [f"{only}: not running"]
        write_result("\n".join(lines))
        if only is not None:
            write_remark(f"`cachalot up --dir {place.path}` starts {only} again")
        elif not wipe and place.cluster_path.exists():
            write_remark(
                f"what the nodes stored stays in {place.nodes_path}; `cachalot down --dir"
                f" {place.path} --wipe` removes it (--dry-run shows what)"
            )


def _check_choice(given: dict[str, object]) -> None:
    """Raises InvalidArgument if more than one of these options is given."""
    said = [name for name, value in given.items() if value is not None]
    if len(said) > 1:
        raise InvalidArgument(said[-1], given=f"{said[0]} too", expected="one of them")


def _check_names(
    place: LocalFolder, *, node: str | None, agent: str | None, engine: str | None
) -> None:
    """Raises InvalidArgument for what the cluster does not have."""
    if node is not None:
        _check_node(place, node)
    if agent is not None:
        _check_agent(place, agent)
    if engine is not None:
        _check_engine(place, engine)


def _check_node(place: LocalFolder, node: str) -> None:
    from ..cluster.map import load_cluster_map
    from .control.changes import check_node_is_known
    from .engine_plan import check_is_no_engine

    cluster_map = load_cluster_map(place.cluster_path)
    check_is_no_engine(place, node, cluster_map.node_by_name)
    check_node_is_known(cluster_map, node)


def _check_agent(place: LocalFolder, agent: str) -> None:
    from ..cluster.map import load_cluster_map

    known = load_cluster_map(place.cluster_path).entrypoint_by_name
    if agent not in known:
        expected = f"one of the map: {', '.join(known) or 'it has none'}"
        raise InvalidArgument("--agent", given=repr(agent)[:80], expected=expected)


def _check_engine(place: LocalFolder, engine: str) -> None:
    check_is_engine(place.read_engine_options(), engine)


def _stop(
    place: LocalFolder, deadlines: StopDeadlines, only: str | None, *, dry_run: bool
) -> list[dict[str, Any]]:
    """What became, or would become, of the recorded processes of the folder's program.

    `only`: of all of them, that agent or engine, or that node or the worker beside it.
    """
    names = [name for name in place.recorded_nodes() if only in (None, name)]
    if dry_run:
        return plan_stop(place, names)
    if place.program == AGENT:
        return [render_stopped(agent) for agent in stop_agents(place, names, deadlines)]
    if place.program == ENGINE:
        return [render_stopped(engine) for engine in stop_engines(place, names, deadlines)]
    return [render_stopped(node) for node in stop_nodes(place, names, deadlines)]


def _remove_engine(
    place: LocalFolder, engine: str | None, wait_s: float, *, dry_run: bool, is_json: bool
) -> None:
    """Take an engine out of the folder: it is drained and stopped, and its files go."""
    from .engine_plan import name_engines, remove_engine
    from .wipe import apply_wipe, plan_engine_removal

    if engine is None:
        raise InvalidArgument("--remove", given="without --engine", expected="the engine to remove")
    with place.locked():
        # Another command may have removed it while this one waited for the lock.
        left = remove_engine(place.read_engine_options(), engine)
        stopped = StoppedProcesses(
            engines=_stop(place.of(ENGINE), StopDeadlines(term_s=wait_s), engine, dry_run=dry_run)
        )
        plan = plan_engine_removal(place, engine)
        if not dry_run:
            apply_wipe(plan)
            # Last: as long as it has the engine, a removal that broke off can be run again.
            place.write_engine_options(left)
    names = [one.name for one in name_engines(left)]
    if is_json:
        # Names that are true of a dry run too.
        found = {"engine": engine, "other_engines": names}
        write_json(render_json(stopped, plan, dry_run=dry_run) | found)
        return
    lines = [*map(render_line, stopped.engines)] or [f"{engine}: not running"]
    write_result("\n".join([*lines, *render_plan(plan, dry_run=dry_run)]))
    has = "would have" if dry_run else "has"
    write_remark(f"the cluster {has} {', '.join(names) or 'no engine'}; `up --engines` adds one")


def _answer_without_cluster(place: LocalFolder, *, dry_run: bool, is_json: bool) -> None:
    # What was wanted is so, as after a `down --wipe`. The path is shown, in case it is misspelt.
    if is_json:
        write_json(render_json(StoppedProcesses(), None, dry_run=dry_run))
    else:
        write_result(f"nothing to stop in {place.path}: there is no cluster")


def plan_stop(place: LocalFolder, names: Sequence[str]) -> list[dict[str, Any]]:
    """What a run without --dry-run would do to the recorded processes of these nodes."""
    found: list[dict[str, Any]] = []
    for node in names:
        process = find_process(place, node)
        if process is None:
            found.append({"node": node, "pid": None, "outcome": "not running"})
        else:
            found.append({"node": node, "pid": process.pid, "outcome": "would be stopped"})
            process.close()
    return found


def _wipe(place: LocalFolder, *, dry_run: bool) -> "WipePlan":
    from ..cluster.map import load_cluster_map
    from .wipe import apply_wipe, plan_wipe

    if not place.cluster_path.exists():
        raise InvalidArgument(
            "--wipe",
            given=place.path,
            expected="a folder with cluster.toml, which says what may be removed; copy it back, or"
            " remove what is left there by hand",
        )
    plan = plan_wipe(place, load_cluster_map(place.cluster_path))
    if not dry_run:
        apply_wipe(plan)
    return plan
