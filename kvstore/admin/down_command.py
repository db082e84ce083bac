"""`cachalot down`: ends what `cachalot up` started, and nothing else."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidArgument, shown
from .down_report import (
    StoppedProcesses,
    describe_loss,
    render_json,
    render_lines,
    render_plan,
    render_stopped,
)
from .engine_plan import AFTER_GRACE_S, check_are_engines, name_engines
from .folder_option import parse_folder
from .local_agents import stop_agents
from .local_engines import stop_engines
from .local_folder import LocalFolder
from .node_process import AGENT, ENGINE, GC_WORKER, KVSTORED, Program, StopDeadlines
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
NodesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        help="Stop this node only; `up` starts it again. May be given several times.",
        metavar="NAME",
    ),
]
AgentsOption = Annotated[
    list[str] | None, typer.Option("--agent", help="The same of an agent.", metavar="NAME")
]
EnginesOption = Annotated[
    list[str] | None,
    typer.Option("--engine", help="The same of an engine, which is drained.", metavar="NAME"),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """Names of what is to be stopped; nothing is named for the whole cluster."""

    nodes: list[str]
    agents: list[str]
    engines: list[str]

    @property
    def names(self) -> list[str]:
        return [*self.nodes, *self.agents, *self.engines]


def down(
    folder: FolderOption,
    wipe: WipeOption = False,
    dry_run: DryRunOption = False,
    nodes: NodesOption = None,
    agents: AgentsOption = None,
    engines: EnginesOption = None,
    is_removal: RemoveOption = False,
    wait_s: WaitOption = 20.0,
    is_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Stop the nodes, agents and engines of a local cluster, or some of them.

    What they stored stays for the next `up`, except with --wipe. May be run again.
    `down --engine d02 --remove` takes an engine out of the cluster: `up --engines` adds one.
    """
    place = LocalFolder(folder)
    chosen = _Chosen(nodes=_once(nodes), agents=_once(agents), engines=_once(engines))
    _check_choice(chosen, wipe=wipe)
    _check_names(place, chosen)
    if is_removal:
        _remove_engines(place, chosen.engines, wait_s, dry_run=dry_run, is_json=is_json)
        return
    programs = (KVSTORED, GC_WORKER, AGENT, ENGINE)
    is_recorded = any(place.of(program).recorded_nodes() for program in programs)
    if not place.cluster_path.exists() and not is_recorded:
        _answer_without_cluster(place, dry_run=dry_run, is_json=is_json)
        return
    with place.locked():
        _warn_of_last_engines(place, chosen.engines)
        stopped = _stop_chosen(place, chosen, StopDeadlines(term_s=wait_s), dry_run=dry_run)
        plan = _wipe(place, dry_run=dry_run) if wipe else None
    if is_json:
        write_json(render_json(stopped, plan, dry_run=dry_run))
    else:
        _report(place, chosen, stopped, plan, dry_run=dry_run)


def _once(names: list[str] | None) -> list[str]:
    return list(dict.fromkeys(names or ()))


def _check_choice(chosen: _Chosen, *, wipe: bool) -> None:
    """Raises InvalidArgument if more than one of these options is given."""
    given = {
        "--node": chosen.nodes,
        "--agent": chosen.agents,
        "--engine": chosen.engines,
        "--wipe": wipe,
    }
    said = [option for option, value in given.items() if value]
    if len(said) > 1:
        raise InvalidArgument(said[-1], given=f"{said[0]} too", expected="one of them")


def _check_names(place: LocalFolder, chosen: _Chosen) -> None:
    """Raises InvalidArgument for what the cluster does not have."""
    if chosen.nodes:
        _check_nodes(place, chosen.nodes)
    if chosen.agents:
        _check_agents(place, chosen.agents)
    if chosen.engines:
        check_are_engines(place.read_engine_options(), chosen.engines)


def _check_nodes(place: LocalFolder, nodes: Sequence[str]) -> None:
    from ..cluster.map import load_cluster_map
    from .control.changes import check_node_is_known
    from .engine_plan import check_is_no_engine

    cluster_map = load_cluster_map(place.cluster_path)
    for node in nodes:
        check_is_no_engine(place, node, cluster_map.node_by_name)
        check_node_is_known(cluster_map, node)


def _check_agents(place: LocalFolder, agents: Sequence[str]) -> None:
    from ..cluster.map import load_cluster_map

    known = load_cluster_map(place.cluster_path).entrypoint_by_name
    for agent in agents:
        if agent not in known:
            expected = f"one of the map: {', '.join(known) or 'it has none'}"
            raise InvalidArgument("--agent", given=shown(agent), expected=expected)


def _warn_of_last_engines(place: LocalFolder, names: Sequence[str]) -> None:
    """Say what the engines that run cannot do without these."""
    if not names:
        return
    running = []
    for engine in name_engines(place.read_engine_options()):
        process = find_process(place.of(ENGINE), engine.name)
        if process is not None:
            process.close()
            running.append(engine)
    loss = describe_loss(running, names)
    if loss:
        write_remark(loss)


def _stop_chosen(
    place: LocalFolder, chosen: _Chosen, deadlines: StopDeadlines, *, dry_run: bool
) -> StoppedProcesses:
    def stop(program: Program, names: list[str]) -> list[dict[str, Any]]:
        if not chosen.names:
            names = place.of(program).recorded_nodes()
        return _stop(place.of(program), names, deadlines, dry_run=dry_run)

    has_worker = place.of(GC_WORKER).recorded_nodes()
    # Who uses the nodes goes first, so that none complains about nodes that are meant to go.
    return StoppedProcesses(
        engines=stop(ENGINE, chosen.engines),
        agents=stop(AGENT, chosen.agents),
        workers=stop(GC_WORKER, [node for node in chosen.nodes if node in has_worker]),
        nodes=stop(KVSTORED, chosen.nodes),
    )


def _stop(
    place: LocalFolder, names: Sequence[str], deadlines: StopDeadlines, *, dry_run: bool
) -> list[dict[str, Any]]:
    """What became, or would become, of these processes of the folder's program."""
    if dry_run:
        return plan_stop(place, names)
    if place.program == AGENT:
        return [render_stopped(agent) for agent in stop_agents(place, names, deadlines)]
    if place.program == ENGINE:
        return [render_stopped(engine) for engine in stop_engines(place, names, deadlines)]
    return [render_stopped(node) for node in stop_nodes(place, names, deadlines)]


def _report(
    place: LocalFolder,
    chosen: _Chosen,
    stopped: StoppedProcesses,
    plan: "WipePlan | None",
    *,
    dry_run: bool,
) -> None:
    lines = render_lines(stopped)
    if not chosen.names and all(node["outcome"] == "not running" for node in stopped.nodes):
        lines.append("no node was running")
    lines += [] if plan is None else render_plan(plan, dry_run=dry_run)
    write_result("\n".join(lines))
    where = shlex.quote(str(place.path))
    if chosen.names:
        verb = "would start" if dry_run else "starts"
        write_remark(f"`cachalot up --dir {where}` {verb} {', '.join(chosen.names)} again")
    elif plan is None and place.cluster_path.exists():
        write_remark(
            f"what the nodes stored stays in {place.nodes_path}; `cachalot down --dir"
            f" {where} --wipe` removes it (--dry-run shows what)"
        )


def _remove_engines(
    place: LocalFolder, engines: Sequence[str], wait_s: float, *, dry_run: bool, is_json: bool
) -> None:
    """Take engines out of the folder: they are drained and stopped, and their files go."""
    from .engine_plan import remove_engines
    from .wipe import apply_wipe, plan_engine_removal

    if not engines:
        raise InvalidArgument("--remove", given="without --engine", expected="the engine to remove")
    with place.locked():
        # Another command may have removed one while this one waited for the lock.
        left = remove_engines(place.read_engine_options(), engines)
        deadlines = StopDeadlines(term_s=wait_s)
        stopped = StoppedProcesses(
            engines=_stop(place.of(ENGINE), engines, deadlines, dry_run=dry_run)
        )
        plan = plan_engine_removal(place, engines)
        if not dry_run:
            apply_wipe(plan)
            # Last: as long as it has the engines, a removal that broke off can be run again.
            place.write_engine_options(left)
    names = [one.name for one in name_engines(left)]
    if is_json:
        # A name that is true of a dry run too.
        write_json(render_json(stopped, plan, dry_run=dry_run) | {"other_engines": names})
        return
    write_result("\n".join([*render_lines(stopped), *render_plan(plan, dry_run=dry_run)]))
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
