"""`cachalot settings`: every setting with its limits and value; hot ones can be changed."""

from typing import TYPE_CHECKING, Annotated, Any

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
    from ..cluster.entities import ClusterMap
    from ..settings import Setting
    from .policy_reader import ClusterPolicy

COLUMNS = ("setting", "heat", "unit", "default", "current", "what it is for")
LEFT_COLUMNS = frozenset({"setting", "heat", "unit", "what it is for"})
COLD_FIGURES = {"memory": "memory_limit_bytes", "sync": "sync"}
"""Where a node's STAT has the value of a cold setting."""
COLD_TARGET_FIGURES = {"segment-bytes": "segment_bytes"}
"""The same for what STAT says of each target."""

app = make_group("Every setting, hot or cold, and its value.")


@app.command("show")
def show(cluster: ClusterOption, wait_s: WaitOption = 2.0, is_json: JsonOption = False) -> None:
    """Show every setting: hot or cold, unit, default, current value.

    A cold one is an option of kvstored; where nodes differ, every value is shown.
    """
    import asyncio

    from .policy_reader import ask_policies_and_reports

    found, cluster_map, reports = asyncio.run(ask_policies_and_reports(cluster, wait_s))
    said = [report.statistics for report in reports if report.is_alive]
    rows = describe_settings(found, find_cold_values(cluster_map, said))
    if is_json:
        write_json({"settings": rows, **found.render_json()})
        return
    write_table(COLUMNS, [_render_row(row) for row in rows], left_columns=LEFT_COLUMNS)
    write_result(f"\n{found.describe()}")


def find_cold_values(cluster_map: "ClusterMap", said: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The values of cold settings that nodes were started with, each value once."""
    values: dict[str, list[Any]] = {"listen": [node.address for node in cluster_map.nodes]}
    for name, figure in COLD_FIGURES.items():
        found = [one[figure] for one in said if isinstance(one.get(figure), int | str)]
        values[name] = list(dict.fromkeys(found))
    targets = [target for one in said for target in one.get("targets", ())]
    for name, figure in COLD_TARGET_FIGURES.items():
        found = [target[figure] for target in targets if isinstance(target.get(figure), int)]
        values[name] = list(dict.fromkeys(found))
    return values


def describe_settings(found: "ClusterPolicy", cold: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """A JSON object for each setting. `current` of a cold one is a list, empty if unknown."""
    from ..settings import SETTINGS, Heat

    policy = found.newest
    return [
        {
            "name": setting.name,
            "heat": setting.heat.value,
            "unit": setting.unit,
            "default": setting.default,
            "current": (
                policy.setting(setting.name)
                if setting.heat is Heat.HOT
                else cold.get(setting.name, [])
            ),
            "is_set": setting.name in policy.settings,
            "what_for": setting.what_for,
        }
        for setting in SETTINGS.values()
    ]


def _render_row(row: dict[str, Any]) -> list[str]:
    from .policy_change import format_setting

    name, current = row["name"], row["current"]
    if isinstance(current, list):
        shown = _render_cold(name, current)
    else:
        shown = format_setting(name, current) + (" (set)" if row["is_set"] else "")
    default = format_setting(name, row["default"])
    return [name, row["heat"], row["unit"], default, shown, row["what_for"]]


def _render_cold(name: str, values: list[Any]) -> str:
    from .quantities import count_of, format_size

    if name == "listen":
        return f"{count_of(len(values), 'address', 'addresses')}, see status"
    shown = [format_size(one) if isinstance(one, int) else str(one) for one in values]
    return ", ".join(shown) or "see the command line of kvstored"


@app.command("set")
def set_setting(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A hot setting.")],
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="A number, 64MiB, 30s, on or off; or default.")
    ],
    cluster: ClusterOption,
    why: WhyOption = "",
    who: WhoOption = None,
    is_dry_run: DryRunOption = False,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    wait_s: WaitOption = 2.0,
    is_json: JsonOption = False,
) -> None:
    """Change a hot setting on all nodes, within 5 s.

    The word default in place of a value brings the default back.
    """
    from .policy_change import ChangeOptions, change_policy

    parsed = parse_setting(name, value)
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
        lambda policy, by: policy.with_setting(name, parsed, who=by.who, why=by.why, at_s=by.at_s),
        request=("PUT", "/api/settings"),
        body={"name": name, "value": parsed},
    )


def parse_setting(name: str, text: str) -> int | bool | None:
    """The value that a text means for a hot setting, in the setting's own unit; None: its default.

    Raises InvalidArgument, for an unknown name or a cold setting with the reason.
    """
    from ..errors import InvalidArgument, shown
    from ..settings import check_setting, hot_setting

    setting = hot_setting(name)
    if text.strip().lower() == "default":
        return None
    value = _parse_value(setting, text)
    try:
        return check_setting(name, value)
    except InvalidArgument as error:
        # In the words that were given, and not in the setting's unit.
        raise InvalidArgument(name, given=shown(text), expected=error.expected) from None


def _parse_value(setting: "Setting", text: str) -> int | bool:
    from ..errors import InvalidArgument, shown
    from .quantities import parse_duration_s, parse_size_bytes

    name = setting.name
    words = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
    plain = text.strip().lower().replace("_", "").replace(",", "")
    if setting.is_switch:
        if plain not in words:
            raise InvalidArgument(name, given=shown(text), expected="on or off")
        return words[plain]
    if plain.isascii() and plain.isdecimal():
        return int(plain[:20])
    if setting.unit == "bytes a second":
        return parse_size_bytes(name, text.strip().removesuffix("/s"))
    if setting.unit == "seconds":
        return parse_duration_s(name, text)
    raise InvalidArgument(name, given=shown(text), expected=setting.rule)
