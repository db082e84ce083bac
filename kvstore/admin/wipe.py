"""Removing what a local cluster stored: only files that it made; all else stays and is named.

The plan is made first, from what is there, so that a dry run shows exactly what a run would do. The
cluster's own folder stays, because it may have been there before.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..cluster.entities import ClusterMap
from ..errors import AgentRefused, TargetLocked
from ..node.segment import TEMPORARY_SUFFIX, find_segment_files
from ..node.target_folder import IDENTITY_NAME, LOCK_NAME
from ..socket_file import LOCK_SUFFIX
from .engine_plan import ENGINE_NAMES, name_engines
from .local_folder import DamagedEngineOptions, LocalFolder
from .local_plan import target_path
from .node_process import AGENT, ENGINE, GC_WORKER

SOFT_STATE = (
    "index.arrow*",
    "segment-*.used*",
    "policy.json",
    "policy.tmp",
    "gc.lock",
    "gc-journal*",
    "gc-scrub.json*",
)
"""Patterns of what a node and its worker keep in a target beside the segments."""


@dataclass(slots=True, kw_only=True)
class WipePlan:
    """Files to remove, then folders that are empty by then, in this order."""

    files: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    """What lies among them and is not ours; the folders around it stay too."""
    locks: list[Path] = field(default_factory=list)
    """Held by a node as long as it serves the target."""
    socket_locks: list[Path] = field(default_factory=list)
    """Held by an agent or an engine as long as it serves the socket."""
    freed_bytes: int = 0
    """On the disk, where a preallocated file takes all of its length."""


def plan_wipe(folder: LocalFolder, cluster_map: ClusterMap) -> WipePlan:
    """What `down --wipe` would remove. Changes nothing."""
    plan = WipePlan()
    for node in cluster_map.nodes:
        _plan_node(plan, folder, cluster_map, node.name)
    plan.folders.append(folder.nodes_path)
    agents = folder.of(AGENT)
    for entrypoint in cluster_map.entrypoints:
        _plan_server(plan, agents, entrypoint.name)
    plan.folders.append(agents.nodes_path)
    engines = folder.of(ENGINE)
    names = _find_engines(folder)
    for name in names:
        _plan_server(plan, engines, name)
    _plan_files(plan, [folder.ticket_key_path])
    plan.folders.append(engines.nodes_path)
    # The map goes last: as long as it is there, a wipe that broke off can be run again.
    options = [folder.options_path, folder.agent_options_path, folder.engine_options_path]
    top = [*options, *map(_temporary, options), folder.token_path]
    _plan_files(plan, [*top, folder.cluster_path])
    records = {
        place.record_path(node.name)
        for node in cluster_map.nodes
        for place in (folder, folder.of(GC_WORKER))
    }
    for entrypoint in cluster_map.entrypoints:
        records |= {agents.record_path(entrypoint.name), agents.socket_path(entrypoint.name)}
    for name in names:
        records |= {engines.record_path(name), engines.socket_path(name)}
    _note_kept(plan, records)
    return plan


def plan_engine_removal(folder: LocalFolder, names: Sequence[str]) -> WipePlan:
    """What `down --remove` would remove of these engines. Changes nothing."""
    plan = WipePlan()
    engines = folder.of(ENGINE)
    for name in names:
        _plan_server(plan, engines, name)
    _note_kept(plan, {engines.record_path(name) for name in names})
    return plan


def _find_engines(folder: LocalFolder) -> list[str]:
    """Those that the folder is to have, and those that it has no more, or not yet: one that did not
    come up at its first start has left a log."""
    wanted: set[str] = set()
    with suppress(DamagedEngineOptions):  # a wipe removes that file too
        wanted = {engine.name for engine in name_engines(folder.read_engine_options())}
    engines = folder.of(ENGINE)
    left = {name for name in ENGINE_NAMES if engines.log_path(name).exists()}
    return sorted(wanted | left)


def _plan_node(plan: WipePlan, folder: LocalFolder, cluster_map: ClusterMap, node: str) -> None:
    for target in cluster_map.targets_by_node[node]:
        place = target.folder(folder.cluster_path)
        # A path that a person wrote into the map may lead to a disk with other things on it.
        if target.path == target_path(node):
            _plan_target(plan, place, cluster=cluster_map.cluster, target=target.name)
        elif place.exists():
            plan.kept.append(place)
    # Not the record itself: a stop removes it, and a dry run must name the same files as a run.
    for one in (folder, folder.of(GC_WORKER)):
        _plan_files(plan, [_temporary(one.record_path(node)), one.log_path(node)])
    plan.folders.append(folder.node_path(node))


def _plan_server(plan: WipePlan, folder: LocalFolder, name: str) -> None:
    """What an agent or an engine left."""
    socket_path, record_path = folder.socket_path(name), folder.record_path(name)
    lock_path = socket_path.with_name(socket_path.name + LOCK_SUFFIX)
    # With a record there is a stop before the wipe, which removes the record and the socket.
    if socket_path.is_socket() and not record_path.exists():
        plan.files.append(socket_path)
    _plan_files(plan, [lock_path, _temporary(record_path), folder.log_path(name)])
    plan.socket_locks.append(lock_path)
    plan.folders.append(folder.node_path(name))


def _plan_target(plan: WipePlan, place: Path, *, cluster: str, target: str) -> None:
    if not place.is_dir():
        return
    identity = place / IDENTITY_NAME
    if not _is_of_target(identity, cluster=cluster, target=target):
        plan.kept.append(place)
        return
    segments, unfinished = find_segment_files(place)
    lock = place / LOCK_NAME
    soft = sorted(path for pattern in SOFT_STATE for path in place.glob(pattern))
    # The identity goes last, for the same reason as the map.
    _plan_files(plan, [*segments, *unfinished, *soft, lock, _temporary(identity), identity])
    plan.locks.append(lock)
    plan.folders.append(place)


def _is_of_target(identity: Path, *, cluster: str, target: str) -> bool:
    try:
        found = json.loads(identity.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    is_object = isinstance(found, dict)
    return is_object and found.get("cluster") == cluster and found.get("target") == target


def _plan_files(plan: WipePlan, paths: list[Path]) -> None:
    for path in paths:
        if path.is_symlink() or path.is_file():
            plan.files.append(path)
            plan.freed_bytes += path.lstat().st_blocks * 512


def _note_kept(plan: WipePlan, records: set[Path]) -> None:
    """Everything in the folders that is neither to be removed nor one of the folders."""
    ours = {*plan.files, *plan.folders, *plan.kept, *records}
    for folder in plan.folders:
        if folder.is_dir():
            plan.kept += sorted(path for path in folder.iterdir() if path not in ours)


def apply_wipe(plan: WipePlan) -> None:
    """Remove what the plan names.

    Raises TargetLocked if a node still runs, AgentRefused if an agent does, and removes nothing.
    """
    detail = "a process that `cachalot up` did not start serves it; nothing was removed"
    for lock in plan.locks:
        if _is_held(lock):
            raise TargetLocked(lock.parent, detail)
    for lock in plan.socket_locks:
        if _is_held(lock):
            raise AgentRefused(lock.with_name(lock.name.removesuffix(LOCK_SUFFIX)), detail)
    for path in plan.files:
        path.unlink(missing_ok=True)
    for path in plan.folders:
        if not plan_keeps(plan, path) and path.is_dir() and not path.is_symlink():
            path.rmdir()


def _is_held(lock: Path) -> bool:
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def plan_keeps(plan: WipePlan, folder: Path) -> bool:
    """Whether something that stays lies in a folder, at whatever depth."""
    return any(folder in path.parents for path in plan.kept)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY_SUFFIX)
