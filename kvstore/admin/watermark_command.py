"""`cachalot watermark`: how full a target may get before eviction starts, and where it stops."""

from pathlib import Path
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
    from .policy_change import ChangeOptions, change_policy

    marks = _complete(cluster, wait_s, high, low)
    change: dict[str, Any] = {"kind": "watermarks", **marks}
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
        lambda policy, by: policy.with_watermarks(**marks, who=by.who, why=by.why, at_s=by.at_s),
        request=("PUT", "/api/policy"),
        body={"change": change},
        previewed=change,
    )


def _complete(cluster: Path, wait_s: float, high: str | None, low: str | None) -> dict[str, float]:
    """Both watermarks: what is not said stays as it is now, so that each change is whole."""
    from ..errors import InvalidArgument
    from .policy_reader import read_cluster_policy

    if high is None and low is None:
        raise InvalidArgument("watermarks", given="neither", expected="--high, --low or both")
    wanted = {
        "high": None if high is None else parse_ratio("--high", high),
        "low": None if low is None else parse_ratio("--low", low),
    }
    now = read_cluster_policy(cluster, wait_s).newest.watermarks.to_values()
    return {name: now[name] if value is None else value for name, value in wanted.items()}
