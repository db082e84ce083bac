"""Every setting of nodes, workers and agents: unit, limits, default, and when it takes effect.

A *hot* setting is a part of the policy that all nodes share (`retention`), and is obeyed within
seconds. A *cold* one is an option of the daemon's command line: it is listed here so that it can be
shown, and is refused with the reason by whoever tries to set it. This module keeps no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from .errors import InvalidArgument, shown

SettingValue = int | bool


class Heat(Enum):
    """When a change takes effect."""

    HOT = "hot"
    """At once: it is a part of the policy."""
    COLD = "cold"
    """At the next start of the daemon, whose command line says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. `low` and `high` are the limits of a number, both included."""

    name: str
    heat: Heat
    unit: str
    """Unit of a number, "on or off" of a switch, "text" of what only a command line says."""
    default: int | bool | str
    what_for: str
    low: int = 0
    high: int = 0

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def rule(self) -> str:
        """What a value must be, in words."""
        if self.is_switch:
            return "true or false"
        limits = f"a whole number of {self.unit} from {self.low} to {self.high}"
        if self.unit.startswith("bytes"):
            return f"{limits} ({_size(self.low)} to {_size(self.high)})"
        return limits


def _size(size_bytes: int) -> str:
    """A limit with the largest unit of which it is a whole number."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift} {unit}"
    return f"{size_bytes} B"


_MIB = 1 << 20
_RATE_BYTES_MAX = 1 << 40


def _rate(name: str, default: int, what_for: str) -> Setting:
    return Setting(
        name=name,
        heat=Heat.HOT,
        unit="bytes a second",
        default=default,
        low=4096,
        high=_RATE_BYTES_MAX,
        what_for=what_for,
    )


def _interval(name: str, default: int, what_for: str) -> Setting:
    return Setting(
        name=name,
        heat=Heat.HOT,
        unit="seconds",
        default=default,
        low=1,
        high=86_400,
        what_for=what_for,
    )


def _switch(name: str, what_for: str) -> Setting:
    return Setting(name=name, heat=Heat.HOT, unit="on or off", default=True, what_for=what_for)


def _cold(name: str, default: str, what_for: str) -> Setting:
    return Setting(name=name, heat=Heat.COLD, unit="text", default=default, what_for=what_for)


_TABLE = (
    _rate("evict_bytes_per_s", 1 << 30, "the most that eviction frees on one node"),
    Setting(
        name="evict_slots_per_s",
        heat=Heat.HOT,
        unit="slots a second",
        default=200_000,
        low=1,
        high=100_000_000,
        what_for="the most slots that eviction frees on one node",
    ),
    _rate("scrub_bytes_per_s", 8 * _MIB, "how fast one node reads its own slots to check them"),
    _rate("repair_bytes_per_s", 64 * _MIB, "how fast one node reads shards to rebuild lost ones"),
    _interval("scan_interval_s", 10, "time between two looks at how full the targets are"),
    _interval("ttl_interval_s", 60, "time between two searches for blocks whose TTL has passed"),
    _switch("repair_is_on", "whether lost shards of blocks in use are rebuilt"),
    _switch("scrub_is_on", "whether slots are read again and again to find bad ones"),
    Setting(
        name="hot_within_s",
        heat=Heat.HOT,
        unit="seconds",
        default=86_400,
        low=1,
        high=10 * 366 * 86_400,
        what_for="a block used within this time is worth repairing",
    ),
    _interval("window_ttl_s", 180, "how long agents keep a window state in memory"),
    _cold("listen", "the address in the cluster map", "where the node serves (cluster map)"),
    _cold("memory", "256MiB", "limit of all buffers for shards on their way (--memory)"),
    _cold("segment-bytes", "256MiB", "length of new segment files (--segment-bytes)"),
    _cold("sync", "interval", "when written shards are put on the device (--sync)"),
)

SETTINGS: Mapping[str, Setting] = MappingProxyType({row.name: row for row in _TABLE})
"""All settings by name, in the order in which they are shown."""


def hot_setting(name: str) -> Setting:
    """The setting that a policy may hold under `name`.

    Raises InvalidArgument for a name that is not in the table, and for a cold one with the reason.
    """
    setting = SETTINGS.get(name) if isinstance(name, str) else None
    hot = ", ".join(row.name for row in _TABLE if row.heat is Heat.HOT)
    if setting is None:
        raise InvalidArgument("setting", given=shown(name), expected=f"one of {hot}")
    if setting.heat is Heat.COLD:
        raise InvalidArgument(
            "setting",
            given=f"{name}, which is cold: the daemon reads it once, from its command line",
            expected=f"a hot one ({hot}); for a cold one start kvstored anew with another option",
        )
    return setting


def check_setting(name: str, value: object) -> SettingValue:
    """The value if the hot setting `name` may have it; InvalidArgument with the rule if not."""
    setting = hot_setting(name)
    if setting.is_switch:
        if isinstance(value, bool):
            return value
    elif type(value) is int and setting.low <= value <= setting.high:
        return value
    raise InvalidArgument(name, given=shown(value), expected=setting.rule)
