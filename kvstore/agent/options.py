"""What an agent is told when it is started, and which of it cannot be. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from pathlib import Path

from ..arena.region import ARENA_BYTES_MAX, ARENA_BYTES_MIN
from ..arena.run_layout import RUN_ALIGN_BYTES
from ..cluster.address import host_of
from ..cluster.validation import NAME_PATTERN, NAME_RULE
from ..errors import InvalidArgument, shown
from ..socket_file import check_socket_path

FETCH_WORKERS_MAX = 64
WINDOW_BYTES_MIN = 1 << 20
LISTEN_DEFAULT = "127.0.0.1:0"
NAMELESS = "agent"
"""The name of an agent on a host whose name has not one letter or digit in it."""


class Role(Enum):
    """What an agent does for engines and gateways."""

    CHECK = "check"
    """Says how much of a prompt is stored."""
    FETCH = "fetch"
    """Brings blocks from the nodes into the arena."""
    STORE = "store"
    """Saves blocks out of the arena."""
    WINDOW = "window"
    """Keeps window state in memory, and gives it to other hosts."""


ALL_ROLES = frozenset(Role)
ARENA_ROLES = frozenset({Role.FETCH, Role.STORE, Role.WINDOW})
"""Roles in which bytes go through the arena."""


def parse_roles(text: str) -> frozenset[Role]:
    """Roles from "check,fetch". Raises InvalidArgument for an unknown one, or for none."""
    names = [name.strip() for name in text.split(",")]
    known = [role.value for role in Role]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidArgument(
            "--roles", given=repr(unknown[0]), expected=f"some of {','.join(known)}"
        )
    return frozenset(Role(name) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Raises InvalidArgument, which names the option of `cachalot agent`."""

    cluster_path: Path
    """The cluster map's file."""
    socket_path: Path
    """Where engines and gateways of this host connect; at most 107 bytes long."""
    roles: frozenset[Role] = ALL_ROLES
    arena_bytes: int = 4 << 30
    """Shared memory for runs, a multiple of 4,096; not used with the role `check` alone."""
    fetch_workers: int = 1
    """Processes that fetch."""
    window_memory_bytes: int = 512 << 20
    """Limit of the window records; not used without the role `window`."""
    listen: str | None = None
    """Where other agents connect, "ip:port" as they are to spell it, port 0: any; None: on
    LISTEN_DEFAULT, or on the address of the entrypoint, which is refused beside another one."""
    listen_fd: int | None = None
    """An inherited listening TCP socket, in place of one on that address."""
    entrypoint: str | None = None
    """Name of this agent in the map's entrypoints: it listens on that address and holds a part of
    the window directory."""
    name: str | None = None
    """What people call this agent, by the rule of names in the map; None: the entrypoint's name, or
    what `fit_name` makes of the host's."""
    is_log_json: bool = False
    """Whether log lines are JSON objects."""

    def __post_init__(self) -> None:
        if not self.roles:
            raise InvalidArgument("--roles", given="none", expected="at least one role")
        check_socket_path(self.socket_path)
        _check_number("--fetch-workers", self.fetch_workers, 1, FETCH_WORKERS_MAX)
        if self.has_arena:
            _check_size("--arena", self.arena_bytes, ARENA_BYTES_MIN, ARENA_BYTES_MAX)
            if self.arena_bytes % RUN_ALIGN_BYTES:
                raise InvalidArgument(
                    "--arena",
                    given=f"{self.arena_bytes} bytes",
                    expected=f"a multiple of {RUN_ALIGN_BYTES}",
                )
        if Role.WINDOW in self.roles:
            least, most = WINDOW_BYTES_MIN, ARENA_BYTES_MAX
            _check_size("--window-memory", self.window_memory_bytes, least, most)
        if self.entrypoint is not None and Role.CHECK not in self.roles:
            raise InvalidArgument(
                "--roles",
                given=f"{','.join(role_names(self.roles))} beside --entrypoint {self.entrypoint}",
                expected="check among them: an entrypoint holds a part of the window directory",
            )
        if self.name is not None and not NAME_PATTERN.fullmatch(self.name):
            raise InvalidArgument("--name", given=shown(self.name), expected=NAME_RULE)
        if self.listen is not None:
            if self.entrypoint is not None:
                raise InvalidArgument(
                    "--listen",
                    given=f"{self.listen!r} beside --entrypoint",
                    expected="one of them: an entrypoint listens on its address in the map",
                )
            if self.listen_fd is None:
                check_listen_address(self.listen)

    @property
    def has_arena(self) -> bool:
        """Whether some role moves bytes."""
        return bool(self.roles & ARENA_ROLES)


def check_listen_address(address: str) -> None:
    """An IP address and a port that other agents can be told. Raises InvalidArgument."""
    host, port = host_of(address), address.rpartition(":")[2]
    expected = '"ip:port" that other hosts can reach, an IPv6 address in brackets'
    try:
        found = ip_address(host)
    except ValueError:
        raise InvalidArgument("--listen", given=shown(address), expected=expected) from None
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not is_port or found.is_unspecified or found.is_multicast:
        raise InvalidArgument("--listen", given=shown(address), expected=expected)


def fit_name(host: str) -> str:
    """What an agent is called on a host of this name: what of it the rule of names in the map
    leaves. Of a name that is too long, its first part."""
    fitting = re.sub(r"[^A-Za-z0-9._-]", "-", host.strip())
    found = NAME_PATTERN.search(fitting)
    if found is None:
        return NAMELESS
    name = found[0]
    return name if found.end() == len(fitting) else name.split(".")[0]


def format_size(size_bytes: int) -> str:
    """A size as messages have it: with the largest unit that leaves at least 1, to a tenth."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f}".removesuffix(".0") + f" {unit}"
    return f"{size_bytes} B"


def role_names(roles: Iterable[Role]) -> list[str]:
    """Names of roles in the order in which they are declared."""
    present = set(roles)
    return [role.value for role in Role if role in present]


def _check_number(name: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgument(name, given=value, expected=f"{least} to {most}")


def _check_size(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        expected = f"{format_size(least)} to {format_size(most)}"
        raise InvalidArgument(name, given=format_size(value), expected=expected)
