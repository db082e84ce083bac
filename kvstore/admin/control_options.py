"""The options that commands have in common, and what follows from them."""

from __future__ import annotations

import getpass
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..cluster.entities import ClusterMap
    from .control_client import ControlPlane

ClusterOption = Annotated[Path, typer.Option("--cluster", help="The cluster map.", metavar="FILE")]
ControlOption = Annotated[
    str | None,
    typer.Option(
        "--control",
        help="The control API to ask, in place of those in the map.",
        metavar="HOST:PORT",
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="File with the control API's token (control-token beside the map).",
        metavar="FILE",
    ),
]
WaitOption = Annotated[
    float,
    typer.Option("--wait-s", help="How long to wait for answers.", metavar="S", min=0.01, max=60.0),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object.")]
WhyOption = Annotated[
    str, typer.Option("--why", help="The reason, for `policy log`.", metavar="TEXT")
]
WhoOption = Annotated[
    str | None,
    typer.Option("--who", help="Who does it, for `policy log` (user@host).", metavar="NAME"),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
WHO_CHARACTERS_MAX = 48


def make_group(what_for: str) -> typer.Typer:
    """A command that has commands of its own."""
    return typer.Typer(
        help=what_for,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def open_control(
    cluster: Path, control: str | None, token_file: Path | None
) -> tuple[ClusterMap, ControlPlane]:
    """The cluster's map, and the control APIs that the options mean.

    Raises ClusterMapError, InvalidArgument, NoWorker.
    """
    from ..cluster.map import load_cluster_map
    from ..token_file import read_token_file
    from .control_client import ControlPlane, find_endpoints, no_worker, parse_control_url

    cluster_map = load_cluster_map(cluster)
    endpoints = find_endpoints(cluster_map) if control is None else [parse_control_url(control)]
    if not endpoints:
        raise no_worker([])
    token = read_token_file(token_file or default_token_path(cluster))
    return cluster_map, ControlPlane(endpoints, token)


def default_token_path(cluster: Path) -> Path:
    """Where the token lies if nothing else is said: beside the cluster map."""
    from ..token_file import TOKEN_NAME

    return cluster.absolute().parent / TOKEN_NAME


def who_asks(who: str | None) -> str:
    """What the log of the policy names: `who`, or the user and the machine of this process."""
    if who is not None:
        return who
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{platform.node() or 'unknown'}"[:WHO_CHARACTERS_MAX]
