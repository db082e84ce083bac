"""`cachalot policy`: who changed what, when and why; and taking the last change back."""

import time
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

if TYPE_CHECKING:
    from ..retention import LogEntry

COLUMNS = ("version", "when (UTC)", "who", "change", "why")
LEFT_COLUMNS = frozenset({"when (UTC)", "who", "change", "why"})

app = make_group("Who changed what, when and why; and undo.")


@app.command("log")
def show_log(
    cluster: ClusterOption,
    entries_max: Annotated[
        int, typer.Option("--last", help="How many changes, newest last.", min=1, max=100)
    ] = 20,
    wait_s: WaitOption = 2.0,
    is_json: JsonOption = False,
) -> None:
    """Show the last changes: who, when, what, from, to, and why."""
    from .policy_reader import read_cluster_policy

    found = read_cluster_policy(cluster, wait_s)
    entries = found.newest.log[-entries_max:]
    if is_json:
        write_json({"log": [entry.to_values() for entry in entries], **found.render_json()})
        return
    if entries:
        write_table(COLUMNS, [_render_row(one) for one in entries], left_columns=LEFT_COLUMNS)
    else:
        write_result("no change yet: the defaults are in force")
    write_result(f"\n{found.describe()}")


def _render_row(entry: "LogEntry") -> list[str]:
    from .policy_change import describe_entry

    undoes = f" (undoes version {entry.undoes})" if entry.undoes is not None else ""
    return [
        str(entry.version),
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.at_s)),
        entry.who,
        describe_entry(entry) + undoes,
        entry.why or "-",
    ]


@app.command("undo")
def undo(
    cluster: ClusterOption,
    why: WhyOption = "",
    who: WhoOption = None,
    is_dry_run: DryRunOption = False,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    wait_s: WaitOption = 2.0,
    is_json: JsonOption = False,
) -> None:
    """Take the last change back. Undoing again goes one change further back."""
    from .policy_change import ChangeOptions, change_policy, warn_of_undone_drain

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
    if not is_dry_run:  # which says itself what it would do
        warn_of_undone_drain(options)
    change_policy(
        options,
        lambda policy, by: policy.undo(who=by.who, why=by.why, at_s=by.at_s),
        request=("POST", "/api/policy/undo"),
        body={},
    )
