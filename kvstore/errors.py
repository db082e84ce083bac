"""The errors of the block store, and what each means for the one who sees it.

    StoreError
    |-- InvalidArgument      (also ValueError)          a caller's mistake; nothing was sent
    |-- ClientClosed         (also RuntimeError)        the client was used after its end
    |-- ClusterMapError
    |   |-- MissingClusterMap  (also FileNotFoundError) there is no map at that path
    |   `-- InvalidClusterMap  (also ValueError)        the map has mistakes; all are listed
    |-- NodeError                                       one node failed; others may still answer
    |   |-- NodeUnreachable    (also ConnectionError)   refused, reset, or never answered
    |   |-- NodeRefused                                 it answered that it will not do this
    |   |-- DeadlineExceeded   (also TimeoutError)      no answer within the time allowed
    |   `-- ProtocolError                               what it sent is not our protocol
    |-- AgentError                                      the agent of this host failed
    |   |-- AgentUnreachable   (also ConnectionError)   not there, gone, or it does not answer
    |   `-- AgentRefused                                it answered that it will not do this
    `-- TargetError
        |-- TargetLocked                                a live process owns the folder
        |-- TargetMismatch                              the folder belongs to something else
        `-- TargetDamaged                               its identity or a segment is damaged

Normal outcomes are not here: a miss, a shorter run, "not stored" are values. Inside the client a
`NodeError` costs one shard and ends there; `fetch`, `match` and `save` never raise one. All of an
`AgentClient` raises AgentError: without its agent it can do nothing, and there are no others.
"""

from __future__ import annotations

import errno
from pathlib import Path

ADVICE = {
    errno.ENOSPC: "make room on its disk, or name a place on another one",
    errno.EDQUOT: "make room within the quota, or name a place on another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EACCES: "run it as a user who may do that, or name another place",
    errno.EPERM: "run it as a user who may do that, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENOENT: "name one that is there",
    errno.ENOTDIR: "name one whose folders are folders",
    errno.EISDIR: "name a file",
    errno.EEXIST: "name another place",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "end what has so many files open",
    errno.ENOMEM: "free memory, or run less on this machine",
    errno.EAGAIN: "end what has so many processes, or raise the limit (ulimit -u)",
    errno.EADDRINUSE: "end what listens there, or name another port",
    errno.EADDRNOTAVAIL: "name an address of this host",
}
"""What may help a person, by what the system says."""


SHOWN_CHARACTERS_MAX = 300
"""Of what a message says was given: who gives 100 kB is to see the rule all the same."""
VALUE_CHARACTERS_MAX = 80


def shorten(value: object, characters_max: int = SHOWN_CHARACTERS_MAX) -> str:
    """A value for a message; of a long one the beginning and the end."""
    text = str(value)
    left_out = len(text) - characters_max
    if left_out <= 0:
        return text
    end = characters_max // 5
    return f"{text[: characters_max - end]} ...({left_out} characters)... {text[-end:]}"


def shorten_lines(text: str) -> str:
    """The same with each line of a text, such as a library makes of a command line."""
    return "\n".join(map(shorten, text.split("\n")))


def shown(value: object) -> str:
    """A single value as Python writes it, for a message: short, and "nothing" for a missing one."""
    return "nothing" if value is None else shorten(repr(value), VALUE_CHARACTERS_MAX)


def describe_os_error(error: OSError) -> str:
    """One line for a person: which file, what the system says of it, and what may help."""
    where = "" if error.filename is None else f"{shorten(error.filename)}: "
    advice = ADVICE.get(error.errno or 0)
    return f"{where}{error.strerror or error}" + (f"; {advice}" if advice else "")


class StoreError(Exception):
    """Base of every error this package raises. `exit_code` is what a command ends with."""

    exit_code = 1


class InvalidArgument(StoreError, ValueError):
    """A value from the caller breaks a rule; names the value given and the rule."""

    exit_code = 2

    def __init__(self, what: str, *, given: object, expected: str) -> None:
        super().__init__(f"{what}: given {shorten(given)}, expected {expected}")
        self.what = what
        self.given = given
        self.expected = expected


class ClientClosed(StoreError, RuntimeError):
    """The client was closed, or never opened, and is asked to do something."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation}: the client is closed; open a new one")
        self.operation = operation


class ClusterMapError(StoreError):
    """The cluster map cannot be used."""

    exit_code = 3


class MissingClusterMap(ClusterMapError, FileNotFoundError):
    """There is no cluster map at the path."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(
            f"no cluster map at {shorten(path)}; `cachalot up --dir D` writes D/cluster.toml for a"
            " new cluster; a lost map is copied back from any client or node, which have the same"
            " file"
        )
        self.path = Path(path)


class InvalidClusterMap(ClusterMapError, ValueError):
    """The cluster map has mistakes; `problems` lists every one of them."""

    def __init__(self, path: str | Path, problems: list[str]) -> None:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        mistakes = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        super().__init__(f"cluster map {shorten(path)} has {mistakes}:{listed}")
        self.path = Path(path)
        self.problems = problems


class NodeError(StoreError):
    """One node failed an operation. `noun`: what it is, where that is no storage node."""

    exit_code = 4

    def __init__(self, node: str, detail: str, *, noun: str = "node") -> None:
        super().__init__(f"{noun} {node}: {detail}")
        self.node = node
        self.detail = detail


class NodeUnreachable(NodeError, ConnectionError):
    """The node refused the connection, reset it, or went away."""


class NodeRefused(NodeError):
    """The node answered that it will not serve the request; `status` is the wire status name."""

    def __init__(self, node: str, status: str, detail: str = "") -> None:
        super().__init__(node, f"refused: {status}{': ' + detail if detail else ''}")
        self.status = status


class DeadlineExceeded(NodeError, TimeoutError):
    """The node did not answer within the time allowed."""


class ProtocolError(NodeError):
    """The peer sent bytes that are not a valid frame; the connection is closed."""


class AgentError(StoreError):
    """The agent of this host, behind `socket_path`, failed an operation."""

    exit_code = 4

    def __init__(self, socket_path: str | Path, detail: str) -> None:
        super().__init__(f"agent {shorten(socket_path)}: {detail}")
        self.socket_path = Path(socket_path)
        self.detail = detail


class AgentUnreachable(AgentError, ConnectionError):
    """There is no agent, it has ended, or it did not answer within the time allowed.

    A client connects again by itself; the same call may work a moment later.
    """


class AgentRefused(AgentError):
    """The agent answered that it will not serve the request, or cannot."""


class TargetError(StoreError):
    """A storage target (a folder on one disk) cannot be served."""

    exit_code = 5

    def __init__(self, path: str | Path, detail: str) -> None:
        super().__init__(f"target {shorten(path)}: {detail}")
        self.path = Path(path)
        self.detail = detail


class TargetLocked(TargetError):
    """A live process serves this folder."""


class TargetMismatch(TargetError):
    """The folder belongs to another cluster, another target, or another format version."""

    def __init__(self, path: str | Path, *, what: str, found: object, expected: object) -> None:
        super().__init__(path, f"its {what} is {found}, expected {expected}")
        self.what = what
        self.found = found
        self.expected = expected


class TargetDamaged(TargetError):
    """Its identity is missing or unreadable although it holds segments, or a segment is damaged."""
