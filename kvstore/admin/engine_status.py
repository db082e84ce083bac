"""Which engine workers the folder of a cluster has, and which of them run. They are not asked: what
they do is in their own status document, and a store knows nothing of it.

Not for engines elsewhere: no map names any.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .local_engines import LocalEngines
from .local_folder import LocalFolder

COLUMNS = ("engine", "state", "pid", "role", "socket")
LEFT_COLUMNS = frozenset({"engine", "state", "role", "socket"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine of the folder; `pid` is None if it does not run."""

    name: str
    role: str
    pid: int | None
    socket: Path

    @property
    def state(self) -> str:
        return "down" if self.pid is None else "running"

    def render_json(self) -> dict[str, Any]:
        """Its object in the JSON output."""
        return {
            "engine": self.name,
            "state": self.state,
            "pid": self.pid,
            "role": self.role,
            "socket": str(self.socket),
        }

    def render_row(self) -> list[str]:
        """Its cells, in the order of COLUMNS."""
        pid = "-" if self.pid is None else str(self.pid)
        return [self.name, self.state, pid, self.role, str(self.socket)]


def find_engines(cluster_path: Path) -> list[EngineStatus]:
    """The engines of the folder that a map lies in; none if it is no folder of `cachalot up`."""
    engines = LocalEngines(LocalFolder(cluster_path.resolve().parent))
    return [
        EngineStatus(
            name=one.name,
            role=one.role,
            pid=engines.pid(one.name),
            socket=engines.socket(one.name),
        )
        for one in engines.wanted
    ]
