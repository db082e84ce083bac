"""Which compressed entries each query attends to: the lightning indexer and the candidate pool."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from kernels.operations import Operations
from kernels.reference.index_scores import IndexKeys
from kernels.reference.tiles import RowTiles, plan_tiles

from .block_cache import BlockCache
from .config import DeepseekV41Config, LayerKind, LayerRole
from .rows import RowBatch
from .weights import IndexerWeights

PIECE_SCORES = 1 << 22
"""Scores that exist at a time; a long prompt in one pass has queries times entries of them."""
GPU_PIECE_SCORES = 1 << 28
"""The same on a GPU, 1 GiB: each piece is some dozens of kernels, which are to have work to do."""


@dataclass(slots=True, eq=False)
class Selection:
    """What the layers of one pass hand on to later ones; nothing of it outlives the pass.

    For each span: `topk_TS` int64, ascending, -1 filled, of the latest layer that chose;
    `pool_TB` likewise, blocks of the candidate pool, from the layer that publishes it on.
    """

    topk: list[torch.Tensor] = field(default_factory=list)
    pool: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class IndexQueries:
    """Some rows of a span: queries on the FP4 grid, and how many entries each may see.

    They stand at positions `first` and on; an entry of `ratio` tokens is seen from its last one on.
    """

    q_TIJ: torch.Tensor
    head_weights_TI: torch.Tensor
    visible_T: torch.Tensor
    tiles: RowTiles
    first: int
    ratio: int

    @property
    def width(self) -> int:
        """The most entries that one of them may see: `visible_T` is not asked, which may lie on a
        device that is busy."""
        count = len(self.visible_T)
        return (self.first + count) // self.ratio if count else 0

    def cut(self, width: int) -> Iterator[tuple[slice, "IndexQueries"]]:
        """Pieces of so many rows that `width` scores of each are not too many."""
        scores = PIECE_SCORES if self.q_TIJ.device.type == "cpu" else GPU_PIECE_SCORES
        step = max(1, scores // max(width, 1))
        count = len(self.visible_T)
        if count <= step:
            yield slice(0, count), self
            return
        for begin in range(0, count, step):
            some = slice(begin, min(begin + step, count))
            yield (
                some,
                IndexQueries(
                    self.q_TIJ[some],
                    self.head_weights_TI[some],
                    self.visible_T[some],
                    plan_tiles(self.tiles.positions_T[some]),
                    self.first + begin,
                    self.ratio,
                ),
            )


@dataclass(frozen=True, slots=True, eq=False)
class EntrySelector:
    """Chooses the top-k of layers that have one of their own."""

    config: DeepseekV41Config
    operations: Operations
    blocks: BlockCache

    def choose(
        self,
        role: LayerRole,
        weights: IndexerWeights,
        query_latent_TQ: torch.Tensor,
        x_TE: torch.Tensor,
        rows: RowBatch,
        selection: Selection,
    ) -> None:
        """Put this layer's choice, and its pool if it publishes one, into `selection`."""
        config, operations = self.config, self.operations
        q_T = operations.linear(query_latent_TQ, weights.query, rows.tiles)
        q_TIJ = q_T.view(-1, config.index_heads, config.index_dim)
        q_TIJ = operations.apply_rope(q_TIJ, rows.compress_rope.cos, rows.compress_rope.sin)
        q_TIJ = operations.round_index_entries(q_TIJ)
        head_weights_TI = operations.linear(x_TE, weights.head_weights, rows.tiles)
        head_weights_TI = head_weights_TI * config.index_scale
        chosen = []
        for number, span in enumerate(rows.spans):
            queries = IndexQueries(
                q_TIJ[span.rows],
                head_weights_TI[span.rows],
                (span.positions_T + 1) // role.ratio,
                span.tiles,
                span.first,
                role.ratio,
            )
            assert role.kv_owner is not None
            keys = self.blocks.index_keys(role.kv_owner, span.block_ids)
            if role.kind is LayerKind.REINDEX:
                topk_TS = self._choose_of_pool(queries, keys, selection.pool[number])
            else:
                topk_TS, pool_TB = self._choose_of_all(role, queries, keys)
                if role.is_candidate_source:
                    rows.observe("candidate_blocks", role.index, pool_TB)
                    selection.pool.append(pool_TB)
            rows.observe("topk", role.index, topk_TS)
            chosen.append(topk_TS)
        selection.topk = chosen

    def _choose_of_all(
        self, role: LayerRole, queries: IndexQueries, keys: IndexKeys
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The top-k of everything visible; the blocks of the pool if the layer publishes one."""
        config, operations = self.config, self.operations
        visible_T = queries.visible_T
        topk_TS = visible_T.new_empty(len(visible_T), config.index_topk)
        pool_columns = config.candidate_blocks if role.is_candidate_source else 0
        pool_TB = visible_T.new_empty(len(visible_T), pool_columns)
        for some, piece in queries.cut(queries.width):
            scores_TG = operations.score_entries(
                piece.q_TIJ,
                piece.head_weights_TI,
                keys,
                piece.visible_T,
                piece.tiles,
                width=piece.width,
            )
            topk_TS[some] = operations.select_topk(scores_TG, config.index_topk)
            if role.is_candidate_source:
                pool_TB[some] = operations.select_candidate_blocks(
                    scores_TG, piece.visible_T, config.candidate_block_entries, pool_columns
                )
        return topk_TS, pool_TB

    def _choose_of_pool(
        self, queries: IndexQueries, keys: IndexKeys, pool_TB: torch.Tensor
    ) -> torch.Tensor:
        """The top-k of what each query's pool holds."""
        config, operations = self.config, self.operations
        entries = config.candidate_block_entries
        topk_TS = pool_TB.new_empty(len(pool_TB), config.index_topk)
        for some, piece in queries.cut(pool_TB.shape[1] * entries):
            candidates_TP = operations.candidate_entries(pool_TB[some], piece.visible_T, entries)
            scores_TP = operations.score_candidates(
                piece.q_TIJ, piece.head_weights_TI, keys, candidates_TP, piece.tiles
            )
            topk_TS[some] = operations.topk_of_candidates(
                scores_TP, candidates_TP, config.index_topk
            )
        return topk_TS
