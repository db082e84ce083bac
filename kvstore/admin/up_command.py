"""`cachalot up`: nodes, agents and engines on this machine, in the background."""

import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidArgument, StoreError
from .control_options import JsonOption
from .engine_plan import (
    EngineWishes,
    add_up_engines,
    choose_options,
    option_words,
    parse_engine_option,
)
from .folder_option import parse_folder
from .local_engines import LocalEngines, check_worker_options
from .local_folder import LocalFolder
from .local_plan import LocalWishes
from .output import write_json, write_remark, write_result, write_table
from .quantities import count_of, format_size, parse_code, parse_size_bytes

if TYPE_CHECKING:
    from ..cluster.entities import Entrypoint, Node
    from .local_cluster import LocalCluster
    from .web_address import WebPage

COLUMNS = ("node", "state", "pid", "address")
AGENT_COLUMNS = ("agent", "state", "pid", "address", "socket")
ENGINE_COLUMNS = ("engine", "state", "pid", "role", "socket")


class Sync(Enum):
    """When a node puts written shards on the device; the words of `kvstored --sync`."""

    NEVER = "never"
    INTERVAL = "interval"
    BATCH = "batch"


FolderOption = Annotated[
    Path,
    typer.Option(
        "--dir", help="Folder of the cluster; made if needed.", metavar="D", parser=parse_folder
    ),
]
NodesOption = Annotated[
    int | None, typer.Option(help="Number of nodes (12 in a new cluster).", metavar="N")
]
CodeOption = Annotated[
    str | None,
    typer.Option(
        help="Data and parity shards of a block (10+2); any K of them are enough to read it.",
        metavar="K+M",
    ),
]
TargetSizeOption = Annotated[
    str | None, typer.Option(help="Most that each node may store (4GiB).", metavar="SIZE")
]
SegmentSizeOption = Annotated[
    str | None, typer.Option(help="Size of the files it stores in (256MiB).", metavar="SIZE")
]
SyncOption = Annotated[
    Sync | None,
    typer.Option(
        help="When written shards are put on the device: never, interval or batch (interval).",
        metavar="WHEN",
    ),
]
NoGcOption = Annotated[
    bool,
    typer.Option("--no-gc", help="Start no gc_worker: nothing is evicted, scrubbed, repaired."),
]
AgentsOption = Annotated[
    int | None,
    typer.Option(help="Agents for engines on this machine (none in a new cluster).", metavar="N"),
]
ArenaOption = Annotated[
    str | None,
    typer.Option(help="Memory that each agent shares with engines (256MiB).", metavar="SIZE"),
]
FetchWorkersOption = Annotated[
    int | None,
    typer.Option(help="Processes of each agent that fetch, 1 to 64 (1).", metavar="N"),
]
WindowMemoryOption = Annotated[
    str | None,
    typer.Option(help="The most that each agent's window states take (64MiB).", metavar="SIZE"),
]
EnginesOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Engine workers, such as 1p1d (prefill and decode) or 1b (both); adds an agent if"
        " there is none.",
        metavar="SPEC",
    ),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(help="Model of the engines: a GGUF file, or a folder.", metavar="PATH"),
]
EngineOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        help="Option of all engines, such as pool-blocks=1024; kept until NAME= takes it back."
        " `cachalot engine --help` lists them. May be given several times.",
        metavar="NAME=VALUE",
    ),
]
WaitOption = Annotated[
    float,
    typer.Option(
        help="How long to wait for all nodes, then for all agents; for engines three times it.",
        metavar="S",
        min=0.1,
        max=3600.0,
    ),
]
ForegroundOption = Annotated[
    bool, typer.Option("--foreground", help="Stay until Ctrl-C or SIGTERM, then stop the nodes.")
]


def up(
    folder: FolderOption,
    nodes: NodesOption = None,
    code: CodeOption = None,
    target_size: TargetSizeOption = None,
    segment_size: SegmentSizeOption = None,
    sync: SyncOption = None,
    is_without_gc: NoGcOption = False,
    agents: AgentsOption = None,
    arena: ArenaOption = None,
    fetch_workers: FetchWorkersOption = None,
    window_memory: WindowMemoryOption = None,
    engines: EnginesOption = None,
    model: ModelOption = None,
    engine_options: EngineOptionsOption = None,
    wait_s: WaitOption = 60.0,
    is_foreground: ForegroundOption = False,
    is_json: JsonOption = False,
) -> None:
    """Start a cluster on this machine, or what of it is down.

    Writes D/cluster.toml. Sizes are like 512MiB, 4GiB or 1TiB. Fewer than 12 disks or little
    memory: --nodes 6 --code 4+2, or --nodes 1 --code 1+0.
    """
    engine_wishes = _wish_engines(engines or (), model, engine_options or ())
    # Their mistakes, before anything is made.
    has_engines = _check_engines(folder, engine_wishes)
    wishes = LocalWishes(
        nodes=nodes,
        code=None if code is None else parse_code("--code", code),
        target_size_bytes=_size("--target-size", target_size),
        agents=agents,
        agents_min=1 if has_engines else 0,
    )
    from .local_cluster import LocalCluster
    from .local_folder import LocalAgentOptions, NodeOptions

    options = NodeOptions(
        segment_size_bytes=_size("--segment-size", segment_size),
        sync=None if sync is None else sync.value,
    )
    agent_options = LocalAgentOptions(
        arena_bytes=_size("--arena", arena),
        fetch_workers=fetch_workers,
        window_memory_bytes=_size("--window-memory", window_memory),
    )
    if is_foreground:
        # As Ctrl-C, from the start on: no process is left behind then.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    cluster, started = LocalCluster.bring_up(
        folder, wishes, options, agent_options, gc=not is_without_gc, deadline_s=wait_s
    )
    # In the foreground it ends with this command, whatever ends that.
    with cluster if is_foreground else nullcontext():
        if has_engines:
            try:
                started += _start_engines(cluster, engine_wishes, deadline_s=3 * wait_s)
            except StoreError:
                if not is_foreground:
                    write_remark(f"the nodes and agents run; `{_down(cluster)}` stops them")
                raise
        if is_foreground:
            _stay(cluster, started, is_json=is_json)
        else:
            report(cluster, started, is_json=is_json)


def _wish_engines(
    counts: Sequence[str], model: Path | None, options: Sequence[str]
) -> EngineWishes:
    return EngineWishes(
        counts=add_up_engines(counts) if counts else None,
        model=None if model is None else os.path.abspath(model),
        options=dict(map(parse_engine_option, options)),
    )


def _check_engines(folder: Path, wishes: EngineWishes) -> bool:
    """Whether engines are to run. Raises InvalidArgument if those asked for now cannot; of those of
    before it is said, and the rest is started without them."""
    engines = LocalEngines(LocalFolder(folder))
    if not wishes.are_any and not engines.wanted:
        return False
    if wishes.options:
        # First: options that no engine would take are not compared with those that run.
        options = choose_options(engines.options, wishes)
        check_worker_options(options, model=wishes.model or engines.model)
    try:
        engines.plan(wishes)
    except InvalidArgument as error:
        if wishes.are_any:
            raise
        write_remark(f"the engines are not started: {error}")
        return False
    return True


def _start_engines(
    cluster: "LocalCluster", wishes: EngineWishes, *, deadline_s: float
) -> list[str]:
    sockets = [cluster.agents.socket(name) for name in cluster.agent_names]
    return cluster.engines.bring_up(wishes, agents=sockets, deadline_s=deadline_s)


def _down(cluster: "LocalCluster") -> str:
    """The command that stops it."""
    return f"cachalot down --dir {shlex.quote(str(cluster.folder))}"


def _stay(cluster: "LocalCluster", started: list[str], *, is_json: bool) -> None:
    """Report, and wait for Ctrl-C or SIGTERM."""
    with suppress(KeyboardInterrupt):
        report(cluster, started, is_json=is_json)
        while True:
            signal.pause()


def _size(what: str, text: str | None) -> int | None:
    return None if text is None else parse_size_bytes(what, text)


def report(cluster: "LocalCluster", started: list[str], *, is_json: bool) -> None:
    """Say what was started and what was running, and what could go wrong later."""
    warn_of_little_room(cluster)
    if is_json:
        write_json(render_json(cluster, started))
        return
    rows = [
        _row(node, cluster.node_pid(node.name), is_started=node.name in started)
        for node in cluster.map.nodes
    ]
    write_table(COLUMNS, rows, left_columns=frozenset(COLUMNS))
    new = sum(node.name in started for node in cluster.map.nodes)
    running = len(rows) - new
    workers = sum(cluster.workers.pid(node.name) is not None for node in cluster.map.nodes)
    write_result(
        f"\n{count_of(new, 'node')} started, {running} {'was' if running == 1 else 'were'}"
        f" running; map: {cluster.cluster_path}\n"
        f"{count_of(workers, 'gc_worker')} beside them"
    )
    _report_agents(cluster, started)
    _report_engines(cluster, started)
    for line in cluster.agents.describe_kept(cluster.map.entrypoints):
        write_remark(line)
    write_result(f"to stop them: {_down(cluster)}")
    page = _find_page(cluster)
    if page is not None:
        write_result(page.describe())


def _row(one: "Node | Entrypoint", pid: int | None, *, is_started: bool) -> list[str]:
    """The cells of a node or an agent, in the order of COLUMNS."""
    return [one.name, *_state_and_pid(pid, is_started=is_started), one.address]


def _state_and_pid(pid: int | None, *, is_started: bool) -> tuple[str, str]:
    if pid is None:
        return "down", "-"
    return "started" if is_started else "was running", str(pid)


def _report_agents(cluster: "LocalCluster", started: list[str]) -> None:
    if not cluster.map.entrypoints:
        return
    rows = [
        [
            *_row(one, cluster.agents.pid(one.name), is_started=one.name in started),
            str(cluster.agents.socket(one.name)),
        ]
        for one in cluster.map.entrypoints
    ]
    write_result("")
    write_table(AGENT_COLUMNS, rows, left_columns=frozenset(AGENT_COLUMNS))
    write_result("")


def _report_engines(cluster: "LocalCluster", started: list[str]) -> None:
    engines = cluster.engines.wanted
    if not engines:
        return
    rows = [
        [
            one.name,
            *_state_and_pid(cluster.engines.pid(one.name), is_started=one.name in started),
            one.role,
            str(cluster.engines.socket(one.name)),
        ]
        for one in engines
    ]
    write_table(ENGINE_COLUMNS, rows, left_columns=frozenset(ENGINE_COLUMNS))
    words = " ".join(["", *option_words(cluster.engines.options)])
    write_result(f"\nthey run {cluster.engines.model}{words}\n")


def _find_page(cluster: "LocalCluster") -> "WebPage | None":
    from .web_address import find_web_page

    has_worker = any(cluster.workers.pid(node.name) is not None for node in cluster.map.nodes)
    return find_web_page(cluster.map, cluster.cluster_path) if has_worker else None


def render_json(cluster: "LocalCluster", started: list[str]) -> dict[str, Any]:
    """The JSON object of `cachalot up --json`."""
    page = _find_page(cluster)
    return {
        "cluster_path": str(cluster.cluster_path),
        "cluster": cluster.map.cluster,
        "code": {"k": cluster.map.code.k, "m": cluster.map.code.m},
        "web_page": page and page.render_json(),
        "nodes": [
            {
                "node": node.name,
                "address": node.address,
                "pid": cluster.node_pid(node.name),
                "is_started": node.name in started,
                "log_path": str(cluster.log_path(node.name)),
                "control": node.control,
                "worker_pid": cluster.workers.pid(node.name),
                "worker_log_path": str(cluster.workers.log_path(node.name)),
            }
            for node in cluster.map.nodes
        ],
        "agents": [
            {
                "agent": one.name,
                "socket": str(cluster.agents.socket(one.name)),
                "address": one.address,
                "pid": cluster.agents.pid(one.name),
                "is_started": one.name in started,
                "log_path": str(cluster.agents.log_path(one.name)),
            }
            for one in cluster.map.entrypoints
        ],
        "engines": [
            {
                "engine": one.name,
                "role": one.role,
                "model": cluster.engines.model,
                "options": cluster.engines.options,
                "socket": str(cluster.engines.socket(one.name)),
                "pid": cluster.engines.pid(one.name),
                "is_started": one.name in started,
                "log_path": str(cluster.engines.log_path(one.name)),
            }
            for one in cluster.engines.wanted
        ],
    }


def warn_of_little_room(cluster: "LocalCluster") -> None:
    """Targets grow as they fill, so a disk that is too small is found out long after the start."""
    wanted = sum(target.size_bytes for target in cluster.map.targets)
    stored = sum(
        file.stat().st_blocks * 512 for file in cluster.folder.glob("nodes/*/target/segment-*")
    )
    free = shutil.disk_usage(cluster.folder).free
    if free + stored < wanted:
        write_remark(
            f"warning: the targets may grow to {format_size(wanted)} in all, but the disk of"
            f" {cluster.folder} has room for {format_size(free + stored)}; when it is full, blocks"
            " are not stored any more"
        )
