"""`cachalot ttl`: how long blocks of each class are kept after their last use."""

from typing import Annotated, Any

import typer

from .control_options import (
    ClusterOption,
    ControlOption,
    DryRunOption,
    JsonOption,
    TokenFileOption,
    WaitOption,
    WhoOption,
    WhyOption,
    make_group,
    open_control,
    who_asks,
)
from .output import write_json, write_result, write_table
from .quantities import format_duration, parse_duration_s

COLUMNS = ("class", "ttl")

app = make_group("How long blocks of each class are kept.")


@app.command("show")
def show(cluster: ClusterOption, wait_s: WaitOption = 2.0, is_json: JsonOption = False) -> None:
    """Show the TTL of each class, and which nodes have this version of the policy.

    A class that is not listed has the TTL of chat.
    """
    from .policy_reader import read_cluster_policy

    found = read_cluster_policy(cluster, wait_s)
    ttl_s = dict(sorted(found.newest.ttl_s.items()))
    if is_json:
        write_json({"ttl_s": ttl_s, **found.render_json()})
        return
    rows = [[name, format_duration(value)] for name, value in ttl_s.items()]
    write_table(COLUMNS, rows, left_columns=frozenset({"class"}))
    write_result(f"\nclasses that are not listed: as chat\n{found.describe()}")


@app.command("set")
def set_ttl(
    ttl_class: Annotated[
        str, typer.Argument(metavar="CLASS", help="A class, such as agent or chat.")
    ],
    ttl: Annotated[str, typer.Argument(metavar="TIME", help="Such as 3d, 36h or 90min.")],
    cluster: ClusterOption,
    why: WhyOption = "",
    who: WhoOption = None,
    is_new: Annotated[
        bool, typer.Option("--new", help="The class is not listed yet, and that is meant.")
    ] = False,
    is_dry_run: DryRunOption = False,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    wait_s: WaitOption = 2.0,
    is_json: JsonOption = False,
) -> None:
    """Change the TTL of a class on all nodes.

    In force within 5 s, without a restart. A TTL counts from the last fetch or save. A shorter one
    lets blocks expire soon: --dry-run shows which.
    """
    from ..retention import RetentionPolicy
    from .policy_change import at_s, report_change, send_change, try_change

    ttl_s = parse_duration_s("TTL", ttl)
    change: dict[str, Any] = {"kind": "ttl", "ttl_class": ttl_class, "ttl_s": ttl_s}
    change["is_new"] = is_new

    def apply(policy: RetentionPolicy) -> RetentionPolicy:
        return policy.with_ttl(
            ttl_class, ttl_s, is_new=is_new, who=who_asks(who), why=why, at_s=at_s()
        )

    if is_dry_run:
        from .gc_preview import preview_change

        tried = try_change(cluster, wait_s, apply)
        preview_change(tried, change, cluster, control, token_file, is_json=is_json)
        return
    _, plane = open_control(cluster, control, token_file)
    body = {"change": change, "who": who_asks(who), "why": why}
    made = send_change(plane, "PUT", "/api/policy", body)
    report_change(made, is_json=is_json, is_dry_run=False)
