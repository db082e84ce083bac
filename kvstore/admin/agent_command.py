"""`cachalot agent`: the process of a compute host between its engines and the storage nodes."""

from pathlib import Path
from typing import Annotated

import typer

from .control_options import ClusterOption
from .quantities import parse_size_bytes

RolesOption = Annotated[
    list[str] | None,
    typer.Option(help="What it does: some of check,fetch,store,window (all).", metavar="ROLES"),
]
SocketOption = Annotated[
    Path,
    # Not typer's own check of what is there, which answers with its usage and without a reason.
    typer.Option(
        "--socket",
        help="Where engines and gateways connect; made.",
        metavar="PATH",
        readable=False,
    ),
]
ArenaOption = Annotated[
    str, typer.Option(help="Memory that it shares with the engines.", metavar="SIZE")
]
FetchWorkersOption = Annotated[
    int, typer.Option(help="Processes that fetch, 1 to 64.", metavar="N")
]
WindowMemoryOption = Annotated[
    str, typer.Option(help="The most that window states may take.", metavar="SIZE")
]
ListenOption = Annotated[
    str | None,
    typer.Option(
        help="Where other agents reach it, as they are to spell it; port 0: any (127.0.0.1:0).",
        metavar="IP:PORT",
    ),
]
EntrypointOption = Annotated[
    str | None,
    typer.Option(
        help="Its name among the map's entrypoints, in place of --listen: it listens there, and"
        " holds a part of the window directory.",
        metavar="NAME",
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        help="What it is called, by the rule of names in the map (the entrypoint's name, or the"
        " host's).",
        metavar="NAME",
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(help="Serve /metrics for Prometheus there.", metavar="HOST:PORT"),
]
ListenFdOption = Annotated[int | None, typer.Option(help="An inherited socket.", hidden=True)]
LogJsonOption = Annotated[
    bool, typer.Option("--log-json", help="Write each log line as a JSON object.")
]


def agent(
    cluster: ClusterOption,
    socket: SocketOption,
    roles: RolesOption = None,
    arena: ArenaOption = "4GiB",
    fetch_workers: FetchWorkersOption = 1,
    window_memory: WindowMemoryOption = "512MiB",
    listen: ListenOption = None,
    entrypoint: EntrypointOption = None,
    name: NameOption = None,
    metrics: MetricsOption = None,
    listen_fd: ListenFdOption = None,
    is_log_json: LogJsonOption = False,
) -> None:
    """Run the agent of this host until SIGTERM or Ctrl-C.

    Once it serves, one JSON line on stdout has its agent, socket, address and pid. Nothing that it
    keeps is on a disk.
    """
    # Here, because they take longer to load than `--help` should.
    from ..agent.main import run_agent
    from ..agent.options import ALL_ROLES, AgentOptions, parse_roles
    from ..metrics.server import MetricsServer, MetricTable
    from .agent_metric_table import AGENT_METRICS

    options = AgentOptions(
        cluster_path=cluster.absolute(),
        socket_path=socket.absolute(),
        # Given twice, both are meant.
        roles=parse_roles(",".join(roles)) if roles else ALL_ROLES,
        arena_bytes=parse_size_bytes("--arena", arena),
        fetch_workers=fetch_workers,
        window_memory_bytes=parse_size_bytes("--window-memory", window_memory),
        listen=listen,
        listen_fd=listen_fd,
        entrypoint=entrypoint,
        name=name,
        is_log_json=is_log_json,
    )
    if metrics is None:
        raise typer.Exit(run_agent(options))
    with MetricsServer.listen(
        "--metrics", metrics, MetricTable("agent", "agent", AGENT_METRICS)
    ) as server:
        raise typer.Exit(run_agent(options, server.serve))
