"""Which engine workers the folder of a cluster has, and what those that run say of themselves.

Not for engines elsewhere: no map names any.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..metrics.readings import read_mapping, read_number
from .engine_plan import LocalEngine
from .engine_socket import EngineSilent, ask_engine_at
from .local_engines import LocalEngines
from .local_folder import DamagedEngineOptions, LocalFolder
from .quantities import count_of, format_duration

COLUMNS = (
    "engine",
    "state",
    "pid",
    "role",
    "requests",
    "waiting",
    "blocks free",
    "blocks",
    "not saved",
    "uptime",
    "socket",
)
LEFT_COLUMNS = frozenset({"engine", "state", "role", "socket"})
ASKED_AT_ONCE = 16
TEXT_CHARACTERS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine of the folder; `pid` is None if it does not run. Figures are None where it does
    not say them; they count since it started."""

    engine: str
    role: str
    pid: int | None
    socket: str
    problem: str = ""
    """Why it does not say how it is, though it runs."""
    model: str | None = None
    """What its model is called."""
    namespace: str | None = None
    """Of its blocks; an engine can hand over to those of the same only."""
    is_draining: bool = False
    uptime_s: float | None = None
    requests: int | None = None
    """That it has at the moment."""
    waiting: int | None = None
    """Of those, requests that no step has begun."""
    free_blocks: int | None = None
    pool_blocks: int | None = None
    saved_blocks: int | None = None
    """Blocks that were saved, or were stored already."""
    failed_blocks: int | None = None
    """Blocks that were to be saved and that the store, or its agent, did not take."""
    dropped_blocks: int | None = None
    """Blocks that were to be saved and were given up by the engine, for want of room or time."""
    dropped_windows: int | None = None
    store_errors: int | None = None
    """Operations of the agent that failed."""
    transfer_errors: int | None = None
    """Moves of blocks between the arena and the pool that failed."""
    blocks_move: Mapping[str, Any] | None = None
    """How blocks get into the pool and out of it, and how fast."""
    document: Mapping[str, Any] | None = None
    """All that it says of itself, in its own words."""

    @property
    def state(self) -> str:
        """One word for a table."""
        if self.pid is None:
            return "down"
        if self.problem:
            return "silent"
        return "draining" if self.is_draining else "running"

    @property
    def is_alive(self) -> bool:
        """It answered in time."""
        return self.pid is not None and not self.problem

    @property
    def unsaved_blocks(self) -> int | None:
        if self.failed_blocks is None or self.dropped_blocks is None:
            return None
        return self.failed_blocks + self.dropped_blocks

    def problems(self) -> list[str]:
        """Lines for a person."""
        lines = [f"engine {self.engine}: {self.problem}"] if self.problem else []
        if self.pid is None:
            lines.append(f"engine {self.engine}: does not run; `cachalot up` starts it")
        if self.unsaved_blocks:
            lines.append(
                f"engine {self.engine}: {count_of(self.unsaved_blocks, 'block')} not saved since it"
                f" started: {self.failed_blocks} failed, {self.dropped_blocks} dropped"
            )
        return lines

    def render_json(self) -> dict[str, Any]:
        """Its object in the JSON output."""
        return asdict(self) | {"state": self.state, "is_alive": self.is_alive}

    def render_row(self) -> list[str]:
        """Its cells, in the order of COLUMNS."""
        return [
            self.engine,
            self.state,
            _shown(self.pid),
            self.role,
            _shown(self.requests),
            _shown(self.waiting),
            _shown(self.free_blocks),
            _shown(self.pool_blocks),
            _shown(self.unsaved_blocks),
            "-" if self.uptime_s is None else format_duration(self.uptime_s),
            self.socket,
        ]


@dataclass(frozen=True, slots=True)
class EnginesStatus:
    """All engines of a folder."""

    engines: tuple[EngineStatus, ...] = ()
    problem: str = ""
    """Why it is not known which there are."""

    @property
    def alive(self) -> int:
        return sum(one.is_alive for one in self.engines)

    @property
    def are_all_alive(self) -> bool:
        return self.alive == len(self.engines) and not self.problem

    def problems(self) -> list[str]:
        """Lines for a person: of each engine, and of what they cannot do together."""
        lines = [f"engines: {self.problem}"] if self.problem else []
        lines += [line for one in self.engines for line in one.problems()]
        return lines + self._missing_roles() + self._strange_models()

    def describe(self) -> str:
        """One line for a person."""
        return f"{self.alive} of {count_of(len(self.engines), 'engine')} alive"

    def render_json(self) -> dict[str, Any]:
        """Its members of the JSON output."""
        return {
            "engines_total": len(self.engines),
            "engines_alive": self.alive,
            "engines": [one.render_json() for one in self.engines],
            "engines_problem": self.problem,
        }

    def _missing_roles(self) -> list[str]:
        roles = {one.role for one in self.engines if one.is_alive}
        if roles == {"prefill"}:
            return [
                "engines: no decode worker answers: an answer gets its first token, which is all"
                " that a prefill worker gives, and its client waits for the rest"
            ]
        if roles == {"decode"}:
            return ["engines: no prefill worker answers; decode workers compute the prompts too"]
        return []

    def _strange_models(self) -> list[str]:
        """Of one folder of engines each has the same model, unless its files were replaced."""
        names: dict[str, list[str]] = {}
        for one in self.engines:
            if one.namespace is not None:
                names.setdefault(one.namespace, []).append(one.engine)
        if len(names) < 2:
            return []
        groups = "; ".join(f"{', '.join(group)} {space}" for space, group in names.items())
        return [f"engines: they cannot hand over, as their models differ (namespaces: {groups})"]


def find_engines(cluster_path: Path, deadline_s: float) -> EnginesStatus:
    """The engines of the folder that a map lies in; none if it is no folder of `cachalot up`."""
    engines = LocalEngines(LocalFolder(cluster_path.resolve().parent))
    try:
        wanted = engines.wanted
    except DamagedEngineOptions as error:
        return EnginesStatus(problem=str(error))
    if not wanted:
        return EnginesStatus()
    with ThreadPoolExecutor(ASKED_AT_ONCE) as askers:
        return EnginesStatus(tuple(askers.map(lambda one: _ask(engines, one, deadline_s), wanted)))


def _ask(engines: LocalEngines, one: LocalEngine, deadline_s: float) -> EngineStatus:
    pid, path = engines.pid(one.name), engines.socket(one.name)
    if pid is None:
        return EngineStatus(engine=one.name, role=one.role, pid=None, socket=str(path))
    try:
        said = ask_engine_at(path, deadline_s)
    except EngineSilent as error:
        return EngineStatus(
            engine=one.name, role=one.role, pid=pid, socket=str(path), problem=str(error)
        )
    return describe_engine(one, pid, path, said)


def describe_engine(
    one: LocalEngine, pid: int, path: Path, said: Mapping[str, Any]
) -> EngineStatus:
    """What follows from its status document, of which any part may be missing."""
    engine = read_mapping(said.get("engine"))
    saves = read_mapping(engine.get("saves"))
    model = read_mapping(said.get("model"))
    stored, known = _integer(saves.get("stored")), _integer(saves.get("known"))
    return EngineStatus(
        engine=one.name,
        role=one.role,
        pid=pid,
        socket=str(path),
        model=_text(model.get("source")),
        namespace=_text(model.get("namespace")),
        is_draining=said.get("is_draining") is True,
        uptime_s=read_number(said.get("uptime_s")),
        requests=_integer(said.get("requests")),
        waiting=_integer(engine.get("waiting")),
        free_blocks=_integer(engine.get("free_blocks")),
        pool_blocks=_integer(engine.get("pool_blocks")),
        saved_blocks=None if stored is None or known is None else stored + known,
        failed_blocks=_integer(saves.get("failed")),
        dropped_blocks=_integer(saves.get("dropped")),
        dropped_windows=_integer(engine.get("dropped_windows")),
        store_errors=_integer(said.get("store_errors")),
        transfer_errors=_integer(said.get("transfer_errors")),
        blocks_move=read_mapping(said.get("blocks_move")) or None,
        document=said,
    )


def _text(value: object) -> str | None:
    return value[:TEXT_CHARACTERS_MAX] if isinstance(value, str) else None


def _integer(value: object) -> int | None:
    number = read_number(value)
    return None if number is None or isinstance(value, bool) else int(number)


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)
