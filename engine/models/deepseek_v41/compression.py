"""Compressed entries: what an owner layer writes into the blocks, and where it is read from.

One entry stands for `ratio` tokens. Its main part is what attention reads, its index key what the
top-k is chosen by; both come from one latent and are written in the cache's own formats at once, so
that every reader sees the same numbers (docs/formats/v41-block.md).
"""

from dataclasses import dataclass

import torch

from kernels.operations import Operations
from kernels.reference.index_scores import IndexKeys
from kernels.reference.tiles import plan_tiles

from .block_cache import BlockCache
from .config import DeepseekV41Config, LayerRole
from .rows import RowBatch, Span
from .weights import CompressorWeights, IndexerWeights


@dataclass(frozen=True, slots=True, eq=False)
class EntryWriter:
    """Computes and writes the entries of an owner layer."""

    config: DeepseekV41Config
    operations: Operations
    blocks: BlockCache

    def write(
        self,
        role: LayerRole,
        compressor: CompressorWeights,
        indexer: IndexerWeights,
        x_TE: torch.Tensor,
        rows: RowBatch,
    ) -> None:
        """Write every entry that the rows complete, but for those before a span's `entries_first`.

        `x_TE`: the layer's normed attention input.
        """
        content_TD = self.operations.linear(x_TE, compressor.content, rows.tiles)
        gate_TD = (
            None
            if compressor.gate is None
            else self.operations.linear(x_TE, compressor.gate, rows.tiles)
        )
        for span in rows.spans:
            gate = None if gate_TD is None else gate_TD[span.rows]
            first, latent_GD = self._latents(role, span, content_TD[span.rows], gate)
            skipped = max(span.entries_first // role.ratio - first, 0)
            if skipped < len(latent_GD):
                latent_GD = self.operations.rms_norm(
                    latent_GD[skipped:], compressor.norm, self.config.norm_epsilon
                )
                self._write_entries(role, indexer, span, rows, first + skipped, latent_GD)

    def _latents(
        self, role: LayerRole, span: Span, content_TD: torch.Tensor, gate_TD: torch.Tensor | None
    ) -> tuple[int, torch.Tensor]:
        """The first group that the span completes, and the latents of all it completes [G, D]."""
        if gate_TD is None:
            return span.first, self.operations.compress_groups(None, content_TD.unsqueeze(1))
        ratio = role.ratio
        first_group = span.first // ratio
        # [T, 2, D]: what the ring keeps of a token, gate first.
        pairs = torch.stack((gate_TD, content_TD), dim=1)
        open_rows = span.state.read_compressor_rows(role.index, first_group * ratio, span.first)
        span.state.write_compressor_rows(role.index, span.first, pairs)
        pairs = torch.cat((open_rows, pairs))
        groups = len(pairs) // ratio
        grouped = pairs[: groups * ratio].unflatten(0, (groups, ratio))
        latents = self.operations.compress_groups(
            grouped[:, :, 0].contiguous(), grouped[:, :, 1].contiguous()
        )
        return first_group, latents

    def _write_entries(
        self,
        role: LayerRole,
        indexer: IndexerWeights,
        span: Span,
        rows: RowBatch,
        first: int,
        latent_GD: torch.Tensor,
    ) -> None:
        operations = self.operations
        assert indexer.key is not None
        assert indexer.key_norm is not None
        groups = torch.arange(first, first + len(latent_GD), device=latent_GD.device)
        rope = rows.frequencies.tables(groups * role.ratio, is_compressed=True)
        main = operations.apply_rope(latent_GD, rope.cos, rope.sin)
        self.blocks.main_entries(role.index, span.block_ids).write(
            first, operations.quantise_main_entries(main)
        )
        key_GJ = operations.linear(latent_GD, indexer.key, plan_tiles(groups))
        key_GJ = operations.rms_norm(key_GJ, indexer.key_norm, self.config.norm_epsilon)
        key_GJ = operations.apply_rope(key_GJ, rope.cos, rope.sin)
        keys: IndexKeys = self.blocks.index_keys(role.index, span.block_ids)
        data, scales = operations.quantise_index_entries(key_GJ)
        keys.data.write(first, data)
        keys.scales.write(first, scales)
