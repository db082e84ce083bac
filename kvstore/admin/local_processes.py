"""The processes of one program in the folder of a local cluster: found, signalled and ended.

What is the same for nodes, for the workers beside them and for agents. They are found by the
folder's records, so a process may have been started by another command; those that were started
here are also known as children, and are reaped.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from socket import socket as Listener

from .local_folder import LocalFolder
from .node_process import StopDeadlines
from .node_start import StartingNode, wait_until_ready
from .node_stop import StoppedNode, find_process, signal_process, stop_nodes

START_DEADLINE_S = 60.0


class LocalProcesses:
    """Belongs to one thread. Whoever starts or stops processes holds the folder's lock."""

    def __init__(self, folder: LocalFolder, stop_deadlines: StopDeadlines) -> None:
        """`folder`: that of the program (`LocalFolder.of`)."""
        self._folder = folder
        self._stop_deadlines = stop_deadlines
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def pid(self, name: str) -> int | None:
        """The pid of the (main) process of that name, None if it is not running.

        A process that was stopped (SIGSTOP) has one.
        """
        process = find_process(self._folder, name)
        if process is None:
            return None
        process.close()
        return process.pid

    def log_path(self, name: str) -> Path:
        """What the process said on stderr."""
        return self._folder.log_path(name)

    def recorded(self) -> list[str]:
        """Names of those that were started and not yet stopped."""
        return self._folder.recorded_nodes()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal.

        Returns after SIGKILL when the process has ended, and after SIGSTOP when it stands still.
        Raises NodeError if it is not running, or if that does not come about.
        """
        signal_process(self._folder, name, number)
        self._reap()

    def stop(
        self, names: Sequence[str], deadlines: StopDeadlines | None = None
    ) -> list[StoppedNode]:
        """End them cleanly. May be called again. Raises NodeError if one does not end."""
        stopped = stop_nodes(self._folder, names, deadlines or self._stop_deadlines)
        self._reap()
        return stopped

    def end_children(self, deadline_s: float) -> None:
        """Kill what this object started and still runs, whatever became of the records."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait(deadline_s)
        self._children.clear()

    def _start_all(
        self,
        names: Sequence[str],
        spawn: Callable[[str], StartingNode],
        listeners: Iterable[Listener],
        deadline_s: float,
    ) -> None:
        """Start a process for each name and wait until all serve; all or none of them run then.

        The listeners that `spawn` hands over are closed here. Raises NodeStartFailed.
        """
        starting: dict[str, StartingNode] = {}
        try:
            try:
                for name in names:
                    starting[name] = spawn(name)
                    self._adopt(starting[name].process)
            finally:
                for listener in listeners:
                    listener.close()
            wait_until_ready(starting, deadline_s=deadline_s)
        except BaseException:
            # None of them was alive before. By record, so that an interrupt between the start of
            # a process and our note of it leaves nothing behind.
            self.stop(names)
            raise
        finally:
            for started in starting.values():
                assert started.process.stdout is not None
                started.process.stdout.close()

    def _adopt(self, child: subprocess.Popen[bytes]) -> None:
        """Note a process that was started here."""
        self._children[child.pid] = child

    def _reap(self) -> None:
        """Take note of children that have ended, or they would stay as zombies."""
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]
