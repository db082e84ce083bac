"""Compressed entries: what an owner layer writes into the blocks, and where it is read from.

One entry stands for `ratio` tokens. Its main part is what attention reads, its index key what the
top-k is chosen by; both come from one latent and are written in the cache's own formats at once, so
that every reader sees the same numbers (docs/formats/v41-block.md).
"""

from dataclasses import dataclass

import torch

from kernels.operations import Operations
from kernels.reference.tiles import RowTiles, plan_tiles

from .block_cache import BlockCache
from .config import DeepseekV41Config, LayerRole
from .rows import Rope, RowBatch, Span
from .weights import CompressorWeights, IndexerWeights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryRows:
    """The entries of one ratio that the rows of a pass complete and write, span after span.

    `groups`: their numbers, one range for each span. `tiles` and `rope` are of all of them; an
    entry turns by the position of its first token.
    """

    groups: tuple[range, ...]
    tiles: RowTiles
    rope: Rope

    @property
    def counts(self) -> list[int]:
        return [len(groups) for groups in self.groups]


def plan_entries(rows: RowBatch, ratio: int) -> EntryRows:
    """Every entry that the rows complete, but for those before a span's `entries_first`."""
    groups = tuple(
        range(min(max(span.first, span.entries_first), span.end) // ratio, span.end // ratio)
        for span in rows.spans
    )
    device = rows.positions_T.device
    numbers_G = torch.cat([torch.arange(its.start, its.stop, device=device) for its in groups])
    return EntryRows(
        groups=groups,
        tiles=plan_tiles(numbers_G),
        rope=rows.frequencies.tables(numbers_G * ratio, is_compressed=True),
    )


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
        entries: EntryRows,
    ) -> None:
        """Write the entries, and what an open group has of the rows into the compressor rings.

        `x_TE`: the layer's normed attention input. `entries`: those of the rows at its ratio.
        """
        operations = self.operations
        # [T, 1 or 2, D]: what the ring keeps of a token, the gate first where there is one.
        parts = [operations.linear(x_TE, compressor.content, rows.tiles)]
        if compressor.gate is not None:
            parts.insert(0, operations.linear(x_TE, compressor.gate, rows.tiles))
        parts_TPD = torch.stack(parts, dim=1)
        grouped = [
            self._tokens_of(role, span, groups, parts_TPD[span.rows])
            for span, groups in zip(rows.spans, entries.groups, strict=True)
        ]
        grouped_GRPD = torch.cat(grouped).unflatten(0, (-1, role.ratio))
        if len(grouped_GRPD) == 0:
            return
        gate, content = None, grouped_GRPD[:, :, -1].contiguous()
        if compressor.gate is not None:
            gate = grouped_GRPD[:, :, 0].contiguous()
        latent_GD = operations.rms_norm(
            operations.compress_groups(gate, content), compressor.norm, self.config.norm_epsilon
        )
        self._write_main(role, rows, entries, latent_GD)
        self._write_keys(role, indexer, rows, entries, latent_GD)

    def _tokens_of(
        self, role: LayerRole, span: Span, groups: range, parts_TPD: torch.Tensor
    ) -> torch.Tensor:
        """Of the tokens of some groups [groups x ratio, parts, D], the first from the ring."""
        ratio = role.ratio
        first = span.first - span.first % ratio
        if ratio > 1:
            before = span.state.read_compressor_rows(role.index, first, span.first)
            span.state.write_compressor_rows(role.index, span.first, parts_TPD)
            parts_TPD = torch.cat((before, parts_TPD))
        return parts_TPD[groups.start * ratio - first : groups.stop * ratio - first]

    def _write_main(
        self, role: LayerRole, rows: RowBatch, entries: EntryRows, latent_GD: torch.Tensor
    ) -> None:
        turned_GD = self.operations.apply_rope(latent_GD, entries.rope.cos, entries.rope.sin)
        main_GB = self.operations.quantise_main_entries(turned_GD)
        for span, groups, main in zip(
            rows.spans, entries.groups, main_GB.split(entries.counts), strict=True
        ):
            self.blocks.main_entries(role.index, span.block_ids).write(groups.start, main)

    def _write_keys(
        self,
        role: LayerRole,
        indexer: IndexerWeights,
        rows: RowBatch,
        entries: EntryRows,
        latent_GD: torch.Tensor,
    ) -> None:
        operations = self.operations
        assert indexer.key is not None
        assert indexer.key_norm is not None
        key_GJ = operations.linear(latent_GD, indexer.key, entries.tiles)
        key_GJ = operations.rms_norm(key_GJ, indexer.key_norm, self.config.norm_epsilon)
        key_GJ = operations.apply_rope(key_GJ, entries.rope.cos, entries.rope.sin)
        data_GB, scales_GB = operations.quantise_index_entries(key_GJ)
        for span, groups, data, scales in zip(
            rows.spans,
            entries.groups,
            data_GB.split(entries.counts),
            scales_GB.split(entries.counts),
            strict=True,
        ):
            keys = self.blocks.index_keys(role.index, span.block_ids)
            keys.data.write(groups.start, data)
            keys.scales.write(groups.start, scales)
