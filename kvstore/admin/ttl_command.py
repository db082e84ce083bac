"""`cachalot ttl`: how long blocks of each class are kept after their last use."""

from typing import TYPE_CHECKING, Annotated

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
)
from .output import write_json, write_result, write_table
from .quantities import format_duration, format_size, parse_duration_s

if TYPE_CHECKING:
    from ..retention import RetentionPolicy
    from .cluster_status import ClassHeld

COLUMNS = ("class", "ttl", "shards", "bytes")

app = make_group("How long blocks of each class are kept.")


@app.command("show")
def show(cluster: ClusterOption, wait_s: WaitOption = 2.0, is_json: JsonOption = False) -> None:
    """Show the TTL of each class, what is stored of it, and which nodes have this policy.

    A class that has no TTL of its own has that of chat.
    """
    import asyncio

    from .cluster_status import describe_cluster
    from .policy_reader import ask_policies_and_reports

    found, cluster_map, reports = asyncio.run(ask_policies_and_reports(cluster, wait_s))
    held = describe_cluster(cluster_map, reports).classes
    if is_json:
        ttl_s = dict(sorted(found.newest.ttl_s.items()))
        stored = {name: {"shards": one.shards, "bytes": one.bytes} for name, one in held.items()}
        write_json({"ttl_s": ttl_s, "classes": stored, **found.render_json()})
        return
    write_table(COLUMNS, render_rows(found.newest, held), left_columns=frozenset({"class"}))
    write_result(f"\nclasses without a TTL of their own: as chat\n{found.describe()}")


def render_rows(policy: "RetentionPolicy", held: "dict[str, ClassHeld]") -> list[list[str]]:
    """The cells of each class that has a TTL or of which something is stored."""
    rows = []
    for name in sorted({*policy.ttl_s, *held}):
        ttl = format_duration(policy.ttl_of(name))
        one = held.get(name)
        rows.append(
            [
                name,
                ttl if name in policy.ttl_s else f"{ttl} (as chat)",
                f"{one.shards:,}" if one else "0",
                format_size(one.bytes if one else 0),
            ]
        )
    return rows


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
    from .policy_change import ChangeOptions, change_policy

    ttl_s = parse_duration_s("TTL", ttl)
    change = {"kind": "ttl", "ttl_class": ttl_class, "ttl_s": ttl_s, "is_new": is_new}
    options = ChangeOptions(
        cluster=cluster,
        control=control,
        token_file=token_file,
        wait_s=wait_s,
        who=who,
        why=why,
        is_dry_run=is_dry_run,
        is_json=is_json,
    )
    change_policy(
        options,
        lambda policy, by: policy.with_ttl(
            ttl_class, ttl_s, is_new=is_new, who=by.who, why=by.why, at_s=by.at_s
        ),
        request=("PUT", "/api/policy"),
        body={"change": change},
        previewed=change,
    )
