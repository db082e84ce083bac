"""The public surface of the block store, for engines and tools."""

from ..key import KeyChain, Namespace
from ..layout import BlockLayout, Section
from .blocking import BlockingStoreClient
from .results import ClientCounters, FetchEnd, FetchResult, SaveResult
from .statistics import NodeReport
from .store_client import StoreClient

__all__ = [
    "BlockLayout",
    "BlockingStoreClient",
    "ClientCounters",
    "FetchEnd",
    "FetchResult",
    "KeyChain",
    "Namespace",
    "NodeReport",
    "SaveResult",
    "Section",
    "StoreClient",
]
