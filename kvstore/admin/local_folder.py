"""The folder of a local cluster: where each file lies, and who may change it.

    D/cluster.toml                  the map; a cluster is there as soon as this file is
    D/nodes.json                    options that its nodes are started with
    D/nodes/n01/target/             what the node stores; only the node looks inside
    D/nodes/n01/kvstored.log        what it said on stderr
    D/nodes/n01/kvstored.json       the process that was started last, until it was stopped
    D/nodes/n01/gc_worker.log       the same of the worker beside the node
    D/nodes/n01/gc_worker.json
    D/agents.json                   options that its agents are started with
    D/agents/a01.sock               where engines reach agent a01
    D/agents/a01/agent.log          what it said on stderr
    D/agents/a01/agent.json         its process
    D/engines.json                  which engines it has, of which model and with which options
    D/engines/ticket-key            the secret by which they know each other's tickets
    D/engines/p01.sock              where clients reach engine p01
    D/engines/p01/engine.log        what it said on stderr
    D/engines/p01/engine.json       its process
    D/control-token                 the secret of the control API

Nothing here starts or stops a process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import ClusterMapError, InvalidArgument, StoreError
from ..token_file import TOKEN_NAME
from .node_process import AGENT, ENGINE, KVSTORED, Program

LOCK_DEADLINE_S = 180.0
"""Longer than a start of nodes and then of agents may take, so that a second one waits for the
first."""
LOCK_POLL_S = 0.05
RECORD_BYTES_MAX = 64 << 10
STAT_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever blocks the file system has."""
PAGE_BYTES = 4096


class LocalFolderBusy(StoreError):
    """Another command works on the same local cluster and does not come to an end."""


class DamagedEngineOptions(StoreError):
    """engines.json is there and does not say which engines the folder has: perhaps some run."""

    def __init__(self, folder: LocalFolder, reason: str) -> None:
        where = shlex.quote(str(folder.path))
        super().__init__(
            f"{folder.engine_options_path}: damaged ({reason}); to have engines again: `cachalot"
            f" down --dir {where}`, remove the file, then `cachalot up --dir {where} --engines SPEC"
            " --model PATH`"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """How each node of a local cluster is started; None leaves it to `kvstored`."""

    segment_size_bytes: int | None = None
    sync: str | None = None

    def updated(self, other: NodeOptions) -> NodeOptions:
        """These options, with those of `other` in their place where it says something."""
        segment_size_bytes = other.segment_size_bytes or self.segment_size_bytes
        return NodeOptions(segment_size_bytes=segment_size_bytes, sync=other.sync or self.sync)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAgentOptions:
    """How each agent of a local cluster is started; None leaves it to `local_agents`."""

    arena_bytes: int | None = None
    fetch_workers: int | None = None
    window_memory_bytes: int | None = None

    def updated(self, other: LocalAgentOptions) -> LocalAgentOptions:
        """These options, with those of `other` in their place where it says something."""
        said = {name: value for name, value in asdict(other).items() if value is not None}
        return replace(self, **said)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngineOptions:
    """The engine workers of a folder: how many of each role, and what is the same for all."""

    model: str = ""
    prefill: int = 0
    decode: int = 0
    both: int = 0
    options: Mapping[str, str | None] = field(default_factory=dict)
    """Of `cachalot engine`, beside those that it gets in any case; None for one without a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """The process that was started for a node, or an agent, of that name. It may have ended, and
    its pid be another's."""

    node: str
    address: str
    pid: int


class LocalFolder:
    """Paths in the folder of one local cluster, and its small JSON files."""

    def __init__(self, path: str | Path, program: Program = KVSTORED) -> None:
        # Resolved, because command lines of running nodes are compared with it.
        self.path = Path(path).resolve()
        self.program = program
        """Whose records and logs are meant."""

    def of(self, program: Program) -> LocalFolder:
        """The same folder, with the records and logs of another program."""
        return LocalFolder(self.path, program)

    @property
    def cluster_path(self) -> Path:
        return self.path / "cluster.toml"

    @property
    def options_path(self) -> Path:
        return self.path / "nodes.json"

    @property
    def token_path(self) -> Path:
        return self.path / TOKEN_NAME

    @property
    def ticket_key_path(self) -> Path:
        return self.of(ENGINE).nodes_path / "ticket-key"

    @property
    def agent_options_path(self) -> Path:
        return self.path / "agents.json"

    @property
    def engine_options_path(self) -> Path:
        return self.path / "engines.json"

    @property
    def nodes_path(self) -> Path:
        """The folder of all nodes; where the program is an agent or an engine, of all those."""
        return self.path / {AGENT: "agents", ENGINE: "engines"}.get(self.program, "nodes")

    def node_path(self, node: str) -> Path:
        return self.nodes_path / node

    def log_path(self, node: str) -> Path:
        return self.node_path(node) / f"{self.program.files}.log"

    def record_path(self, node: str) -> Path:
        return self.node_path(node) / f"{self.program.files}.json"

    def socket_path(self, name: str) -> Path:
        """Where engines reach an agent; where the program is an engine, where clients reach it."""
        place = self if self.program == ENGINE else self.of(AGENT)
        return place.nodes_path / f"{name}.sock"

    def place_path(self, name: str) -> Path:
        """The path on the command line of that process which no other folder's has."""
        return self.socket_path(name) if self.program == ENGINE else self.cluster_path

    def create(self) -> None:
        """Make the folder. Raises InvalidArgument if that cannot be done, or not written in."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise InvalidArgument(
                "folder", given=self.path, expected=f"a folder to write in: {error.strerror}"
            ) from error

    def refuse_lost_map(self) -> None:
        """Raises LostClusterMap if there is no map but there was one; call it with the lock held.

        A new map would be another cluster's: what is stored would be refused, and nodes that
        still run would be taken for those of the new one.
        """
        # numpy comes with it, which a cluster whose map is there does without.
        from ..node.target_folder import IDENTITY_NAME

        if any(self.nodes_path.glob(f"*/target/{IDENTITY_NAME}")) or self.recorded_nodes():
            raise LostClusterMap(self)

    @contextmanager
    def locked(self, *, deadline_s: float = LOCK_DEADLINE_S) -> Iterator[None]:
        """Hold the folder against other commands that start or stop its nodes.

        The lock is on the folder itself, so it leaves no file and ends with its process. Raises
        LocalFolderBusy after `deadline_s`, InvalidArgument if the folder cannot be opened.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidArgument(
                "folder", given=self.path, expected=f"a folder to work in: {error.strerror}"
            ) from error
        try:
            _lock(descriptor, self.path, deadline_s)
            yield
        finally:
            os.close(descriptor)

    def read_options(self) -> NodeOptions:
        """The options of nodes.json; the defaults if it is missing or not ours."""
        found = _read_json(self.options_path)
        size, sync = found.get("segment_size_bytes"), found.get("sync")
        return NodeOptions(
            segment_size_bytes=size if type(size) is int and size > 0 else None,
            sync=sync if isinstance(sync, str) else None,
        )

    def write_options(self, options: NodeOptions) -> None:
        _write_json(self.options_path, asdict(options))

    def read_agent_options(self) -> LocalAgentOptions:
        """The options of agents.json; the defaults if it is missing or not ours."""
        found = _read_json(self.agent_options_path)
        names = [field.name for field in fields(LocalAgentOptions)]
        numbers = {name: found.get(name) for name in names}
        return LocalAgentOptions(
            **{name: n for name, n in numbers.items() if type(n) is int and n > 0}
        )

    def write_agent_options(self, options: LocalAgentOptions) -> None:
        _write_json(self.agent_options_path, asdict(options))

    def read_engine_options(self) -> LocalEngineOptions:
        """What engines.json says; none if it is missing. Raises DamagedEngineOptions: engines that
        nobody knows of any more would run on."""
        try:
            with open(self.engine_options_path, "rb") as file:
                found = json.loads(file.read(RECORD_BYTES_MAX))
        except (FileNotFoundError, NotADirectoryError):
            return LocalEngineOptions()
        except (ValueError, RecursionError):
            raise DamagedEngineOptions(self, "it is not JSON") from None
        found = found if isinstance(found, dict) else {}
        model = found.get("model")
        counts = {name: found.get(name) for name in ("prefill", "decode", "both")}
        if not isinstance(model, str) or any(type(n) is not int or n < 0 for n in counts.values()):
            raise DamagedEngineOptions(self, "it lacks the model, or how many engines there are")
        options = found.get("options", {})
        is_mapping = isinstance(options, dict)
        if not is_mapping or any(type(one) not in (str, type(None)) for one in options.values()):
            raise DamagedEngineOptions(self, "its options are none")
        numbers = {name: int(n or 0) for name, n in counts.items()}
        return LocalEngineOptions(model=model, options=options, **numbers)

    def write_engine_options(self, options: LocalEngineOptions) -> None:
        _write_json(self.engine_options_path, asdict(options))

    def recorded_nodes(self) -> list[str]:
        """Names of the nodes that have a record, sorted. Needs no map, which may be broken."""
        found = self.nodes_path.glob(f"*/{self.program.files}.json")
        return sorted(path.parent.name for path in found)

    def read_record(self, node: str) -> NodeRecord | None:
        """What was started last for `node`; None if it was stopped or the file is not ours."""
        found = _read_json(self.record_path(node))
        pid, address = found.get("pid"), found.get("address")
        if type(pid) is not int or pid <= 0 or not isinstance(address, str):
            return None
        return NodeRecord(node=node, address=address, pid=pid)

    def write_record(self, record: NodeRecord) -> None:
        _write_json(self.record_path(record.node), asdict(record))

    def remove_record(self, node: str) -> None:
        self.record_path(node).unlink(missing_ok=True)


class LostClusterMap(ClusterMapError):
    """The nodes of a cluster were started here, and its map is gone."""

    def __init__(self, folder: LocalFolder) -> None:
        super().__init__(
            f"{folder.cluster_path} is gone, but {folder.nodes_path} holds what the nodes of that"
            " cluster stored; copy the map back from any client or backup and run this again, or"
            f" give up what is stored: `cachalot down --dir {shlex.quote(str(folder.path))}`, then"
            f" remove {folder.nodes_path}"
        )
        self.path = folder.cluster_path


def _lock(descriptor: int, path: Path, deadline_s: float) -> None:
    due_s = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= due_s:
                raise LocalFolderBusy(
                    f"folder {path}: another command has been working on it for"
                    f" {deadline_s:.0f} s; see what it waits for, then try again"
                ) from None
            time.sleep(LOCK_POLL_S)
        else:
            return


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """An OSError of writing says which file it was: the system does so only where one is opened."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(RECORD_BYTES_MAX))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file as a whole: a command that is killed leaves the old one or the new one.

    On a full disk what is there already can be written again, and one record in place of another:
    processes that have died are to be started again there too.
    """
    text = (json.dumps(content) + "\n").encode()
    if _has_content(path, text):
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming_file(path):
            temporary.write_bytes(text)
            os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _overwrite(path, text):
            raise


def _has_content(path: Path, content: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(content) + 1) == content
    except OSError:
        return False


def _overwrite(path: Path, content: bytes) -> bool:
    """Write over a small file in the room that it has; whether that was possible.

    One write within one page, which a kill does not divide. White space fills up what was longer.
    """
    try:
        with open(path, "r+b", buffering=0) as file:
            status = os.fstat(file.fileno())
            content = content.ljust(status.st_size)
            room_bytes = min(status.st_blocks * STAT_BLOCK_BYTES, PAGE_BYTES)
            return len(content) <= room_bytes and file.write(content) == len(content)
    except OSError:
        return False
