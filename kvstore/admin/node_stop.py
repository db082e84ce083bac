"""Stopping the nodes of a local cluster: exactly those processes that were started for it.

A folder's records are of one program (`LocalFolder.of`): its nodes, the workers beside them, the
agents or the engines of the machine; "node" below is what the record is of.
Works from the records that a start left, not from the map, so that nodes can be stopped whose map
was broken by hand in the meantime.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum

from ..errors import NodeError
from .local_folder import LocalFolder, NodeRecord
from .node_process import PID_MAX, NodeProcess, StopDeadlines, is_alive, terminate
from .output import write_remark

ASIDE_SUFFIX = ".foreign"
CONNECT_S = 0.5
SIGNAL_DEADLINE_S = 10.0
"""A killed process ends, and a stopped one stands still, well within this."""


class StopOutcome(Enum):
    """What became of a node that was to be stopped."""

    STOPPED = "stopped"
    """It ended by itself after SIGTERM."""
    KILLED = "killed"
    """It needed SIGKILL; it will rebuild its index at the next start."""
    NOT_RUNNING = "not running"
    """Its process had ended before. Its pid may be another process's now, which is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedNode:
    """One node and what was done; `pid` is None if nothing was ever recorded for it."""

    node: str
    pid: int | None
    outcome: StopOutcome


def find_process(folder: LocalFolder, node: str) -> NodeProcess | None:
    """The live process of the folder's program that was started for a node here, or None."""
    record = folder.read_record(node)
    if record is None:
        return None
    place_path = folder.place_path(node)
    return NodeProcess.find(record.pid, place_path=place_path, node=node, program=folder.program)


def signal_process(folder: LocalFolder, node: str, number: int) -> None:
    """Send a signal to the process of a node.

    Returns after SIGKILL when the process has ended, and after SIGSTOP when it stands still.
    Raises NodeError if it is not running, or if that does not come about.
    """
    process = find_process(folder, node)
    if process is None:
        raise NodeError(node, "is not running", noun=folder.program.noun)
    with process:
        process.send(number)
        is_done = True
        if number == signal.SIGKILL:
            is_done = process.wait_for_end(deadline_s=SIGNAL_DEADLINE_S)
        elif number == signal.SIGSTOP:
            is_done = process.wait_for_stop(deadline_s=SIGNAL_DEADLINE_S)
        if not is_done:
            detail = f"process {process.pid} ignores signal {number}"
            raise NodeError(node, detail, noun=folder.program.noun)


def stop_nodes(
    folder: LocalFolder, nodes: Sequence[str], deadlines: StopDeadlines
) -> list[StoppedNode]:
    """Stop the processes of `nodes` and remove their records. May be called again.

    A record that names a live process that is not ours is kept aside, with a remark: perhaps
    somebody edited it, and the node still runs.
    Raises NodeError if a process is still there after SIGKILL; its record stays.
    """
    with ExitStack() as held:
        processes = {}
        for node in nodes:
            process = find_process(folder, node)
            if process is not None:
                processes[node] = held.enter_context(process)
        was_killed = terminate(processes, deadlines)
        pids = {node: process.pid for node, process in processes.items()}
    done = []
    for node in nodes:
        record = folder.read_record(node)
        if node not in pids:
            pid, outcome = record.pid if record else None, StopOutcome.NOT_RUNNING
        elif node in was_killed:
            pid = pids[node]
            outcome = StopOutcome.KILLED if was_killed[node] else StopOutcome.STOPPED
        else:
            continue
        if outcome is StopOutcome.NOT_RUNNING and record is not None:
            _remark_what_is_left(folder, record)
        folder.remove_record(node)
        done.append(StoppedNode(node=node, pid=pid, outcome=outcome))
    for node, pid in pids.items():
        if node not in was_killed:
            detail = f"process {pid} does not end, not even by SIGKILL"
            raise NodeError(node, detail, noun=folder.program.noun)
    return done


def _remark_what_is_left(folder: LocalFolder, record: NodeRecord) -> None:
    """Say on stderr what a record that led to no process of ours leaves open."""
    pid, who = record.pid, f"{folder.program.noun} {record.node}"
    if pid > PID_MAX:
        write_remark(f"{who}: its record names process {pid}, which no process can have")
    elif is_alive(pid):
        path = folder.record_path(record.node)
        aside = path.with_name(path.name + ASIDE_SUFFIX)
        os.replace(path, aside)
        write_remark(
            f"{who}: process {pid} is alive but is not this {folder.program.noun}, so it was left"
            f" alone; its record was kept as {aside}"
        )
    if _is_listening(record.address):
        write_remark(f"{who}: something is still listening on {record.address}")


def _is_listening(address: str) -> bool:
    """Whether anybody takes connections on `host:port`; False if that is no address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True
