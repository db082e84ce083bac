"""Takes the longest stored prefix of a prompt out of the store and into pool blocks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstore.key import Namespace
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import plan_dense_hit

from .block_pool import BlockPool
from .block_store import BlockStore
from .store_faults import STORE_ERRORS, StoreFaults


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """What the store had of a prompt. `hit_blocks` leading blocks are in the pool and verified."""

    matched_blocks: int = 0
    hit_blocks: int = 0
    rejected_shards: int = 0
    match_s: float = 0.0
    fetch_s: float = 0.0

    @property
    def hit_tokens(self) -> int:
        return self.hit_blocks * BLOCK_TOKENS


class PrefixReader:
    """Match, plan, fetch. Any fault of the store is a shorter hit."""

    def __init__(
        self,
        store: BlockStore,
        *,
        namespace: Namespace,
        pool: BlockPool,
        faults: StoreFaults,
        fetch_deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._pool = pool
        self._faults = faults
        self._fetch_deadline_s = fetch_deadline_s
        self._clock = clock

    def read(self, keys: list[bytes], block_ids: list[int], *, prompt_tokens: int) -> PrefixHit:
        """Fill leading blocks of `block_ids`; those after `hit_blocks` hold anything.

        `keys` is the key chain of the prompt's full blocks.
        """
        if not keys:
            return PrefixHit()
        start_s = self._clock()
        try:
            matched_blocks = self._store.match(self._namespace, keys)
        except STORE_ERRORS as error:
            self._faults.note("match", error)
            return PrefixHit(match_s=self._clock() - start_s)
        hit = PrefixHit(matched_blocks=matched_blocks, match_s=self._clock() - start_s)
        wanted_blocks = plan_dense_hit(prompt_tokens, matched_blocks).hit_tokens // BLOCK_TOKENS
        if wanted_blocks == 0:
            return hit
        return self._fetch(hit, keys[:wanted_blocks], block_ids[:wanted_blocks])

    def _fetch(self, hit: PrefixHit, keys: list[bytes], block_ids: list[int]) -> PrefixHit:
        start_s = self._clock()
        buffers = [self._pool.buffer(block_id) for block_id in block_ids]
        try:
            outcome = self._store.fetch(
                self._namespace, keys, buffers, deadline_s=self._fetch_deadline_s
            )
        except STORE_ERRORS as error:
            self._faults.note("fetch", error)
            return replace(hit, fetch_s=self._clock() - start_s)
        assert 0 <= outcome.blocks <= len(keys), (outcome.blocks, len(keys))
        return replace(
            hit,
            hit_blocks=outcome.blocks,
            rejected_shards=outcome.rejected_shards,
            fetch_s=self._clock() - start_s,
        )
