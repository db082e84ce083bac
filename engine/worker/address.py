"""Where a worker listens: the path of a Unix socket, or host and port."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import shown
from kvstore.socket_file import SOCKET_PATH_BYTES_MAX

from ..errors import InvalidRequest

PORT_MAX = 65_535
EXPECTED = f"a path with a / in it, of at most {SOCKET_PATH_BYTES_MAX} bytes, or HOST:PORT"


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Either `path` of a Unix socket, or `host` and `port`."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, what: str = "address") -> WorkerAddress:
    """An address from a command line. A path has a slash in it. Raises InvalidRequest."""
    if "/" in text:
        if len(os.fsencode(text)) > SOCKET_PATH_BYTES_MAX:
            raise InvalidRequest(
                what, given=f"a path of {len(os.fsencode(text))} bytes", expected=EXPECTED
            )
        return WorkerAddress(path=Path(text))
    return parse_host_port(text, what, EXPECTED)


def parse_host_port(text: str, what: str, expected: str = "HOST:PORT") -> WorkerAddress:
    """An address that is no path. Raises InvalidRequest."""
    host, separator, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= PORT_MAX
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if not (separator and is_port and is_bracketed == (":" in host) and _is_host(host)):
        # Without brackets nobody could tell the port from the last part of an IPv6 address.
        hint = ", an IPv6 address in brackets: [::1]:PORT" if text.count(":") > 1 else ""
        raise InvalidRequest(what, given=shown(text), expected=f"{expected}{hint}")
    return WorkerAddress(host=host, port=int(port))


def _is_host(host: str) -> bool:
    """Whether it can be looked up; a name with a label that is empty or too long is an error there
    that is none of the system's."""
    if not set(host).isdisjoint("[]/"):
        return False
    if ":" in host:
        return _is_ipv6(host)
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def _is_ipv6(host: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False
