"""Which compressed entries each query attends to: the lightning indexer and the candidate pool."""

from dataclasses import dataclass, field

import torch

from kernels.operations import Operations

from .block_cache import BlockCache
from .config import DeepseekV41Config, LayerKind, LayerRole
from .rows import RowBatch
from .weights import IndexerWeights


@dataclass(slots=True, eq=False)
class Selection:
    """What the layers of one pass hand on to later ones; nothing of it outlives the pass.

    For each span: `topk_TS` int64, ascending, -1 filled, of the latest layer that chose;
    `candidates_TP` likewise, entries of the pool, from the layer that publishes it on.
    """

    topk: list[torch.Tensor] = field(default_factory=list)
    candidates: list[torch.Tensor] = field(default_factory=list)


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
        choose = self._choose_of_pool if role.kind is LayerKind.REINDEX else self._choose_of_all
        chosen = [
            choose(role, number, rows, q_TIJ[span.rows], head_weights_TI[span.rows], selection)
            for number, span in enumerate(rows.spans)
        ]
        for topk_TS in chosen:
            rows.observe("topk", role.index, topk_TS)
        selection.topk = chosen

    def _choose_of_all(
        self,
        role: LayerRole,
        number: int,
        rows: RowBatch,
        q_TIJ: torch.Tensor,
        head_weights_TI: torch.Tensor,
        selection: Selection,
    ) -> torch.Tensor:
        config, operations = self.config, self.operations
        span = rows.spans[number]
        visible_T = (span.positions_T + 1) // role.ratio
        keys = self.blocks.index_keys(role.index, span.block_ids)
        scores_TG = operations.score_entries(q_TIJ, head_weights_TI, keys, visible_T, span.tiles)
        if role.is_candidate_source:
            assert len(selection.candidates) == number
            entries = config.candidate_block_entries
            blocks = operations.select_candidate_blocks(
                scores_TG, visible_T, entries, config.candidate_blocks
            )
            rows.observe("candidate_blocks", role.index, blocks)
            selection.candidates.append(operations.candidate_entries(blocks, visible_T, entries))
        return operations.select_topk(scores_TG, config.index_topk)

    def _choose_of_pool(
        self,
        role: LayerRole,
        number: int,
        rows: RowBatch,
        q_TIJ: torch.Tensor,
        head_weights_TI: torch.Tensor,
        selection: Selection,
    ) -> torch.Tensor:
        assert role.kv_owner is not None
        span = rows.spans[number]
        keys = self.blocks.index_keys(role.kv_owner, span.block_ids)
        candidates_TP = selection.candidates[number]
        scores_TP = self.operations.score_candidates(
            q_TIJ, head_weights_TI, keys, candidates_TP, span.tiles
        )
        return self.operations.topk_of_candidates(scores_TP, candidates_TP, self.config.index_topk)
