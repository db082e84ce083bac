"""Attention over a sliding window and chosen compressed entries, with a sink, to a grouped output.

One latent row a token is key and value at once. It is rounded to the cache's format before anyone
sees it: the token itself, the tokens of the same pass and those of later ones read equal numbers.
"""

from dataclasses import dataclass

import torch

from kernels.operations import Operations

from .block_cache import BlockCache
from .config import DeepseekV41Config, LayerRole
from .rows import Rope, RowBatch, Span, WindowView
from .selection import EntrySelector, Selection
from .weights import AttentionWeights


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The attention sublayer of every layer of the model proper."""

    config: DeepseekV41Config
    operations: Operations
    blocks: BlockCache
    selector: EntrySelector

    def run(
        self,
        role: LayerRole,
        weights: AttentionWeights,
        x_TE: torch.Tensor,
        rows: RowBatch,
        selection: Selection,
    ) -> torch.Tensor:
        """Output [T, E] for the normed input; writes the rows into the window rings.

        `rows` know their windows in this layer's half.
        """
        rope = rows.compress_rope if role.ratio else rows.rope
        query_latent_TQ = query_latents(self.config, self.operations, weights, x_TE, rows)
        q_THD = queries(self.config, self.operations, weights, query_latent_TQ, rows, rope)
        window_TB = window_rows(self.config, self.operations, weights, x_TE, rows, rope)
        if weights.indexer is not None:
            self.selector.choose(role, weights.indexer, query_latent_TQ, x_TE, rows, selection)
        chosen = selection.topk if role.ratio else [None] * len(rows.spans)
        parts = [
            self._attend(role, weights, q_THD[span.rows], window_TB[span.rows], span, view, topk_TS)
            for span, view, topk_TS in zip(rows.spans, rows.windows, chosen, strict=True)
        ]
        return project_output(self.config, self.operations, weights, torch.cat(parts), rows, rope)

    def _attend(
        self,
        role: LayerRole,
        weights: AttentionWeights,
        q_THD: torch.Tensor,
        window_TB: torch.Tensor,
        span: Span,
        view: WindowView,
        topk_TS: torch.Tensor | None,
    ) -> torch.Tensor:
        before = span.state.read_window_rows(role.index, view.base, span.first)
        span.state.write_window_rows(role.index, span.first, window_TB)
        window_ND = self.operations.dequantise_window_rows(
            torch.cat((before, window_TB)), torch.float32
        )
        entries = None
        if role.kv_owner is not None:
            entries = self.blocks.main_entries(role.kv_owner, span.block_ids)
        return self.operations.sparse_attention(
            q_THD,
            window_ND,
            view.index_TW,
            entries,
            topk_TS,
            weights.sink,
            self.config.softmax_scale,
            span.tiles,
        )


def query_latents(
    config: DeepseekV41Config,
    operations: Operations,
    weights: AttentionWeights,
    x_TE: torch.Tensor,
    rows: RowBatch,
) -> torch.Tensor:
    """[T, q rank], shared by the queries of attention and of the indexer."""
    latent_TQ = operations.linear(x_TE, weights.q_a, rows.tiles)
    return operations.rms_norm(latent_TQ, weights.q_norm, config.norm_epsilon)


def queries(
    config: DeepseekV41Config,
    operations: Operations,
    weights: AttentionWeights,
    query_latent_TQ: torch.Tensor,
    rows: RowBatch,
    rope: Rope,
) -> torch.Tensor:
    """[T, H, D] after RoPE. They are not normed by head, unlike V4's."""
    q_T = operations.linear(query_latent_TQ, weights.q_b, rows.tiles)
    q_THD = q_T.view(-1, config.heads, config.head_dim)
    return operations.apply_rope(q_THD, rope.cos, rope.sin)


def window_rows(
    config: DeepseekV41Config,
    operations: Operations,
    weights: AttentionWeights,
    x_TE: torch.Tensor,
    rows: RowBatch,
    rope: Rope,
) -> torch.Tensor:
    """Window rows as the ring keeps them, uint8 [T, row bytes]."""
    kv_TD = operations.linear(x_TE, weights.kv, rows.tiles)
    kv_TD = operations.rms_norm(kv_TD, weights.kv_norm, config.norm_epsilon)
    return operations.quantise_window_rows(operations.apply_rope(kv_TD, rope.cos, rope.sin))


def project_output(
    config: DeepseekV41Config,
    operations: Operations,
    weights: AttentionWeights,
    o_THD: torch.Tensor,
    rows: RowBatch,
    rope: Rope,
) -> torch.Tensor:
    """Turn the values back by the query's position, then the grouped low-rank output [T, E]."""
    o_THD = operations.apply_rope(o_THD, rope.cos, rope.sin, inverse=True)
    grouped = o_THD.reshape(len(o_THD), config.output_groups, -1)
    group_weights = weights.out_a.view(config.output_groups, config.output_rank, -1)
    low_rank = [
        operations.linear(grouped[:, group].contiguous(), group_weights[group], rows.tiles)
        for group in range(config.output_groups)
    ]
    return operations.linear(torch.cat(low_rank, dim=1), weights.out_b, rows.tiles)
