"""Follows the cluster's retention policy, of which an agent obeys one setting: `window_ttl_s`.

Every few seconds another storage node is asked; the newest document that was seen is the one in
force, as between the nodes themselves. Until one was seen the defaults are. Asking also makes the
store client look for a newer cluster map, so that a host without traffic follows it too.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from ..errors import NodeError
from ..retention import DEFAULT_POLICY, RetentionPolicy

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
DEADLINE_S = 1.0
NODES_ASKED_MAX = 3
"""Nodes that are asked one after the other when they do not answer."""


class PolicySource(Protocol):
    """What is needed of a StoreClient."""

    async def ask_policy(self, *, turn: int = ..., deadline_s: float = ...) -> RetentionPolicy: ...


class PolicyFollower:
    """`policy` is the newest one that was seen. `first_turn`: which node is asked first."""

    def __init__(
        self,
        source: PolicySource,
        *,
        sleep: Callable[[float], Awaitable[None]],
        first_turn: int = 0,
    ) -> None:
        self.policy = DEFAULT_POLICY
        self._source = source
        self._sleep = sleep
        self._turn = first_turn
        self._is_silent = False

    def window_ttl_s(self) -> float:
        """How long a window record lives."""
        return float(self.policy.setting("window_ttl_s"))

    async def run(self) -> None:
        """Follows until it is cancelled."""
        while True:
            await self.look()
            await self._sleep(INTERVAL_S)

    async def look(self) -> bool:
        """Asks once; whether any node answered."""
        for _ in range(NODES_ASKED_MAX):
            self._turn += 1
            try:
                policy = await self._source.ask_policy(turn=self._turn, deadline_s=DEADLINE_S)
            except NodeError as error:
                log.debug("no policy: %s", error)
                continue
            self._take(policy)
            self._is_silent = False
            return True
        if not self._is_silent:
            log.warning("no storage node tells its policy: version=%d stays", self.policy.version)
            self._is_silent = True
        return False

    def _take(self, policy: RetentionPolicy) -> None:
        if not policy.is_newer_than(self.policy):
            return
        log.info("policy: version %d follows %d", policy.version, self.policy.version)
        self.policy = policy
