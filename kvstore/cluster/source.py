"""Where a process gets its cluster map from, and how it learns that there is a newer one."""

import os
from pathlib import Path
from typing import Protocol

from ..errors import InvalidClusterMap
from .map import ClusterMap, parse_cluster_map, read_map_file


class MapSource(Protocol):
    """The seam between a process and whatever keeps the cluster's map."""

    def load(self) -> ClusterMap:
        """The newest map. May be called again. Raises ClusterMapError and changes nothing then."""

    def has_changed(self) -> bool:
        """Whether `load` may give something else than last time. Cheap, and changes nothing."""


class FileMapSource:
    """A map in a file that is replaced as a whole, which is what `write_cluster_map` does."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._loaded: ClusterMap | None = None
        self._seen: tuple[int, ...] | None = None

    def load(self) -> ClusterMap:
        """Read the file.

        Refuses another cluster's map, one of another code, and one that is different but not newer.
        """
        content, state = read_map_file(self.path)
        cluster_map = parse_cluster_map(content, self.path)
        problems = _changes_refused(self._loaded, cluster_map)
        if problems:
            raise InvalidClusterMap(self.path, problems)
        self._loaded = cluster_map
        self._seen = _fingerprint(state)
        return cluster_map

    def has_changed(self) -> bool:
        """Whether the file is another one than at the last successful `load`, or is gone."""
        try:
            return _fingerprint(os.stat(self.path)) != self._seen
        except OSError:
            return True


def _changes_refused(old: ClusterMap | None, new: ClusterMap) -> list[str]:
    """Why `new` may not follow `old`; empty if it may."""
    if old is None or old == new:
        return []
    if new.cluster != old.cluster:
        return [f"cluster: given {new.cluster}, expected {old.cluster} as before"]
    problems = []
    if (new.code.k, new.code.m) != (old.code.k, old.code.m):
        problems.append(
            f"code: given {new.code.k}+{new.code.m}, expected {old.code.k}+{old.code.m} as before:"
            " with another code every block that is stored would be unreadable"
        )
    if new.epoch <= old.epoch:
        problems.append(f"epoch: given {new.epoch}, expected more than {old.epoch} after a change")
    return problems


def _fingerprint(state: os.stat_result) -> tuple[int, ...]:
    return (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
