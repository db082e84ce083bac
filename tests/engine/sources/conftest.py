"""Real nodes and real agents, started once."""

from tests.engine.store_processes import (
    agent,
    client,
    cluster,
    frail_agent,
    frail_cluster,
    own_client,
    shared_agent,
)

__all__ = [
    "agent",
    "client",
    "cluster",
    "frail_agent",
    "frail_cluster",
    "own_client",
    "shared_agent",
]
