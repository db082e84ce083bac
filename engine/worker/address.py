"""Where a worker listens: the path of a Unix socket, or host and port."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

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
    host, separator, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= PORT_MAX
    host = host.removeprefix("[").removesuffix("]")
    if not (separator and _is_host(host) and is_port):
        raise InvalidRequest(what, given=repr(text), expected=EXPECTED)
    return WorkerAddress(host=host, port=int(port))


def _is_host(host: str) -> bool:
    """Whether it can be looked up; a name with a label that is empty or too long is an error there
    that is none of the system's."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False
