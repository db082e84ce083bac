"""Watches the own node and the cluster map: is it there, how busy is it, has the map changed?"""

from __future__ import annotations

import logging

from kvstore.errors import NodeError

from .context import WorkerContext

log = logging.getLogger(__name__)

INTERVAL_S = 1.0


async def run(context: WorkerContext) -> None:
    """Follows both until it is cancelled. A node that is down is said once, and when it is back."""
    is_up = True
    while True:
        context.link.follow_map()
        asked_s = context.clock.monotonic_s()
        try:
            stat = await context.link.statistics(context.node)
        except NodeError as error:
            if is_up:
                log.warning("the own node does not answer, waiting for it: %s", error)
            is_up, context.node_stat = False, {}
        else:
            if not is_up:
                log.info("the own node answers again node=%s", context.node)
            is_up, context.node_stat = True, stat
            context.traffic.note(stat, context.clock.monotonic_s() - asked_s)
        await context.sleep(INTERVAL_S)
