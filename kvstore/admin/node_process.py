"""One process that runs for a cluster, found by its pid *and* its command line, and signalled.

A pid alone proves nothing: the process may have ended and the kernel given its number to another.
So a process is opened first (pidfd_open), which pins it, and looked at then; signals go to what was
opened. Nothing here knows a folder, or starts a process.
"""

from __future__ import annotations

import errno
import os
import pwd
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import NodeError

STATE_POLL_S = 0.01
DYING_DEADLINE_S = 5.0
"""For a process that is ending already."""
ENDED_STATES = ("Z", "X")
PID_MAX = 1 << 22
"""Linux gives no process a number above that, on any machine."""
NO_PROCESS = (errno.ESRCH, errno.ENOENT, errno.EINVAL)
"""What pidfd_open says of a number that is free (ESRCH), or now that of a thread of some process
(ENOENT, or EINVAL on older kernels)."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a process runs: as `python -m MODULE`, or as an installed SCRIPT."""

    module: str
    script: str
    command: str = ""
    """Its first argument, of a script that has several commands."""
    name_option: str = "--node"
    """The option that says which one of its kind it is."""
    noun: str = "node"
    """What a message calls the one that is named so; also the key of its ready line."""
    place_option: str = "--cluster"
    """The option whose path says which folder's it is."""

    @property
    def files(self) -> str:
        """What its log and its record are called, without their endings."""
        return self.command or self.script


KVSTORED = Program("kvstore.node", "kvstored")
GC_WORKER = Program("gc_worker", "gc_worker")
AGENT = Program("kvstore.admin.cli", "cachalot", "agent", name_option="--name", noun="agent")
ENGINE = Program(
    "engine.worker", "engine", name_option="--name", noun="engine", place_option="--listen"
)


class NodeProcess:
    """A live process for one node of one map, or one engine. Close it, or use it in `with`."""

    def __init__(self, pid: int, descriptor: int, node: str, program: Program) -> None:
        self.pid = pid
        self._node = node
        self._program = program
        self._descriptor = descriptor

    @classmethod
    def find(
        cls, pid: int, *, place_path: Path, node: str, program: Program = KVSTORED
    ) -> NodeProcess | None:
        """The process `pid` if it is alive and runs `program` for exactly this place and
        node. `place_path`: the map; of an engine, its socket.

        Raises NodeError if the system does not say, as when no more files may be opened: a node
        about which nothing is known must not count as ended.
        """
        try:
            descriptor = _open_process(pid)
        except OSError as error:
            raise _unknown(pid, node, error, program) from error
        if descriptor is None:
            return None
        try:
            command = _read_command(pid)
        except OSError as error:
            os.close(descriptor)
            raise _unknown(pid, node, error, program) from error
        if not is_command_of_node(command, place_path=place_path, node=node, program=program):
            os.close(descriptor)
            return None
        return cls(pid, descriptor, node, program)

    def send(self, number: int) -> None:
        """Send a signal; nothing happens if the process has just ended.

        Raises NodeError for a process of another user.
        """
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return
        except PermissionError as error:
            owner = _read_owner(self.pid)
            detail = f"process {self.pid} is of user {owner}; run this as that user, or as root"
            raise NodeError(self._node, detail, noun=self._program.noun) from error

    def wait_for_end(self, *, deadline_s: float) -> bool:
        """Whether the process has ended, at the latest `deadline_s` from now."""
        return _wait_for_end(self._descriptor, deadline_s)

    def wait_for_stop(self, *, deadline_s: float) -> bool:
        """Whether the process stands still after SIGSTOP, at the latest `deadline_s` from now."""
        due_s = time.monotonic() + deadline_s
        while _read_state(self.pid) not in ("T", "t"):
            if time.monotonic() >= due_s:
                return False
            time.sleep(STATE_POLL_S)
        return True

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def is_alive(pid: int) -> bool:
    """Whether a process of that number runs, whosever it is."""
    try:
        descriptor = _open_process(pid)
    except OSError:
        # It cannot be opened, but it is there: no number that is free comes to this.
        return True
    if descriptor is None:
        return False
    try:
        if _is_without_memory(pid):
            return not _wait_for_end(descriptor, DYING_DEADLINE_S)
    finally:
        os.close(descriptor)
    return _read_state(pid) not in ENDED_STATES


def _is_without_memory(pid: int) -> bool:
    """Whether a process gave back its memory, and with it its command line, which it does before
    it counts as ended: for some tens of milliseconds, if it had much. (Or it is the kernel's.)"""
    try:
        return not any(_read_command(pid))
    except OSError:
        return False


def _wait_for_end(descriptor: int, deadline_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(deadline_s, 0.0) * 1000))


def _open_process(pid: int) -> int | None:
    """A descriptor of a process, or None if there is none of that number."""
    try:
        return os.pidfd_open(pid)
    except OverflowError:
        return None
    except OSError as error:
        if error.errno in NO_PROCESS:
            return None
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class StopDeadlines:
    """How long to wait for processes to end, all of them together."""

    term_s: float = 20.0
    """After SIGTERM: a node finishes what it writes and syncs its segments."""
    kill_s: float = 10.0
    """After SIGKILL: only the kernel can be slow then."""


def terminate(
    processes: Mapping[str, NodeProcess],
    deadlines: StopDeadlines,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, bool]:
    """SIGTERM to all, then SIGKILL to those that are left; for each node whether it had to be.

    A node that has not even ended then is not in the answer.
    """
    for process in processes.values():
        process.send(signal.SIGTERM)
        # A process that somebody stopped would see the SIGTERM only when it goes on.
        process.send(signal.SIGCONT)
    left = _wait(processes, processes, clock() + deadlines.term_s, clock)
    for node in left:
        processes[node].send(signal.SIGKILL)
    immortal = _wait(processes, left, clock() + deadlines.kill_s, clock)
    return {node: node in left for node in processes if node not in immortal}


def _wait(
    processes: Mapping[str, NodeProcess],
    nodes: Iterable[str],
    due_s: float,
    clock: Callable[[], float],
) -> list[str]:
    """Wait for the processes of `nodes` until `due_s`; the nodes whose process still runs then."""
    return [node for node in nodes if not processes[node].wait_for_end(deadline_s=due_s - clock())]


def is_command_of_node(
    command: Sequence[str], *, place_path: Path, node: str, program: Program = KVSTORED
) -> bool:
    """Whether a command line is that of `program` for exactly this place (absolute) and node."""
    first = _find_first_argument(command, program)
    if first is None or (program.command and list(command[first : first + 1]) != [program.command]):
        return False
    given = _option(command, program.place_option)
    is_there = (
        given is not None and os.path.isabs(given) and os.path.realpath(given) == str(place_path)
    )
    return is_there and _option(command, program.name_option) == node


def _find_first_argument(command: Sequence[str], program: Program) -> int | None:
    """Where in a command line the arguments of `program` begin; None if it runs another one."""
    names = (program.module, f"{program.module}.main")
    for index, (flag, name) in enumerate(pairwise(command)):
        if flag == "-m" and name in names:
            return index + 2
    # A script with a shebang runs as: interpreter, path of the script, its arguments.
    for index, word in enumerate(command[:2]):
        if os.path.basename(word) == program.script:
            return index + 1
    return None


def _option(command: Sequence[str], name: str) -> str | None:
    for index, word in enumerate(command):
        if word == name and index + 1 < len(command):
            return command[index + 1]
        if word.startswith(name + "="):
            return word[len(name) + 1 :]
    return None


def _unknown(pid: int, node: str, error: OSError, program: Program) -> NodeError:
    detail = f"cannot tell whether its process {pid} is alive: {error.strerror}"
    return NodeError(node, detail, noun=program.noun)


def _read_command(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended, or is only waiting to be reaped.

    Also empty for a process of another user that the system hides: that is none of ours.
    """
    try:
        content = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return os.fsdecode(content).split("\0")[:-1]


def _read_owner(pid: int) -> str:
    """The name of the user whose process it is, or the number if there is no name."""
    try:
        number = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "another name"  # the system hides it
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def read_option(pid: int, name: str) -> str | None:
    """The value of an option on a process's command line; None if it has none, or has ended."""
    try:
        return _option(_read_command(pid), name)
    except OSError:
        return None


def _read_state(pid: int) -> str:
    """The state letter of a process as proc(5) has it, "X" if there is no such process."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return "X"
    # The second field is the name in brackets, which may itself hold any character.
    return content.rpartition(b")")[2].split()[0].decode()
