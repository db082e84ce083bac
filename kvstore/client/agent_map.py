"""The cluster map that an agent follows, as its clients on the same host read it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..cluster.entities import ClusterMap
from ..cluster.source import FileMapSource
from ..errors import ClusterMapError

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


class AgentMap:
    """`current` is the newest map that was read; None before the first `look`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.current: ClusterMap | None = None
        self._clock = clock
        self._source: FileMapSource | None = None
        self._path = ""
        self._looked_at_s = 0.0

    def look(self, cluster_path: str) -> None:
        """Read the map at the path of the agent's, if there may be a newer one.

        Raises ClusterMapError if there is none at all; one that has gone bad changes nothing.
        """
        if self._source is None or self._path != cluster_path:
            source = FileMapSource(cluster_path)
            self.current = source.load()
            self._source, self._path, self._looked_at_s = source, cluster_path, self._clock()
        elif self._clock() - self._looked_at_s >= LOOK_INTERVAL_S:
            self._looked_at_s = self._clock()
            if self._source.has_changed():
                self._reload(self._source)

    def _reload(self, source: FileMapSource) -> None:
        try:
            self.current = source.load()
        except ClusterMapError as error:
            log.warning("the cluster map cannot be used, the old one stays: %s", error)
