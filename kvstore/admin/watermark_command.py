"""`cachalot watermark`: how full a target may get before eviction starts, and where it stops."""

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
from .output import write_json, write_result
from .quantities import format_ratio, parse_ratio

app = make_group("How full a target may get.")


@app.command("show")
def show(cluster: ClusterOption, wait_s: WaitOption = 2.0, is_json: JsonOption = False) -> None:
    """Show both watermarks, and which nodes have this version of the policy."""
    from .policy_reader import read_cluster_policy

    found = read_cluster_policy(cluster, wait_s)
    marks = found.newest.watermarks
    if is_json:
        write_json({"watermarks": marks.to_values(), **found.render_json()})
        return
    write_result(
        f"high  {format_ratio(marks.high)}  of a target in use: eviction starts\n"
        f"low   {format_ratio(marks.low)}  eviction stops\n\n{found.describe()}"
    )


@app.command("set")
def set_watermarks(
    cluster: ClusterOption,
    high: Annotated[
        str | None, typer.Option(help="Eviction starts, such as 0.9 or 90%.", metavar="SHARE")
    ] = None,
    low: Annotated[
        str | None, typer.Option(help="Eviction stops, such as 0.85 or 85%.", metavar="SHARE")
    ] = None,
    why: WhyOption = "",
    who: WhoOption = None,
    is_dry_run: DryRunOption = False,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    wait_s: WaitOption = 2.0,
    is_json: JsonOption = False,
) -> None:
    """Change one watermark or both on all nodes.

    In force within 5 s, without a restart. Lower ones let the least used blocks go at once:
    --dry-run shows which.
    """
    from ..errors import InvalidArgument
    from ..retention import RetentionPolicy
    from .policy_change import at_s, report_change, send_change, try_change
    from .policy_reader import read_cluster_policy

    if high is None and low is None:
        raise InvalidArgument("watermarks", given="neither", expected="--high, --low or both")
    wanted = {
        "high": None if high is None else parse_ratio("--high", high),
        "low": None if low is None else parse_ratio("--low", low),
    }
    # What is not said stays as it is now; the API takes both, so that each change is whole.
    now = read_cluster_policy(cluster, wait_s).newest.watermarks.to_values()
    marks = {name: now[name] if value is None else value for name, value in wanted.items()}
    change: dict[str, Any] = {"kind": "watermarks", **marks}

    def apply(policy: RetentionPolicy) -> RetentionPolicy:
        return policy.with_watermarks(**marks, who=who_asks(who), why=why, at_s=at_s())

    if is_dry_run:
        from .gc_preview import preview_change

        tried = try_change(cluster, wait_s, apply)
        preview_change(tried, change, cluster, control, token_file, is_json=is_json)
        return
    _, plane = open_control(cluster, control, token_file)
    body = {"change": change, "who": who_asks(who), "why": why}
    made = send_change(plane, "PUT", "/api/policy", body)
    report_change(made, is_json=is_json, is_dry_run=False)
