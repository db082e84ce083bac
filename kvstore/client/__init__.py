"""The public surface of the block store, for engines and tools."""

from ..arena.losses import BlockLoss
from ..key import KeyChain, Namespace
from ..layout import BlockLayout, Section
from .agent_blocking import BlockingAgentClient
from .agent_client import AgentClient
from .agent_results import PromptMatch, RunOffer, RunOperation
from .arena_run import ArenaRun
from .blocking import BlockingStoreClient
from .rebuilt_blocks import check_rebuilt
from .results import ClientCounters, FetchEnd, FetchResult, SaveResult
from .statistics import NodeReport
from .store_client import StoreClient

__all__ = [
    "AgentClient",
    "ArenaRun",
    "BlockLayout",
    "BlockLoss",
    "BlockingAgentClient",
    "BlockingStoreClient",
    "ClientCounters",
    "FetchEnd",
    "FetchResult",
    "KeyChain",
    "Namespace",
    "NodeReport",
    "PromptMatch",
    "RunOffer",
    "RunOperation",
    "SaveResult",
    "Section",
    "StoreClient",
    "check_rebuilt",
]
